// Where everything stands. Positions come from dagre, for one part at a time: sixty nodes take 0.06 s.

const pen = document.createElement('canvas').getContext('2d');
const FONT = {label: '600 12px system-ui, sans-serif', sub: '10.5px ui-monospace, monospace', chip: '10px system-ui, sans-serif', group: '600 11px system-ui, sans-serif'};

function textWidth(text, font) {
  pen.font = FONT[font];
  return pen.measureText(text).width;
}

const MARGIN = 6;
const LINE = 14.5; // height of a line of text

// Long texts stand on several lines, broken where a name ends; none is cut.
function wrapped(text, length) {
  const lines = [''];
  for (const piece of text.split(/(?<=[\s,.+·/])/)) {
    if (lines.at(-1) && (lines.at(-1) + piece).trimEnd().length > length) lines.push('');
    lines.push(...(lines.pop() + piece).match(new RegExp(`.{1,${2 * length}}`, 'gs')) ?? ['']);
  }
  return lines.map((line) => line.trim()).filter(Boolean).join('\n');
}

// Several results stand below each other: `(bf16[…], bf16[…])`.
const resultLines = (value) => value.replace(/^\((.*\].*)\)$/s, '$1').split(/(?<=\](?:@\w+)?), /).map((one) => wrapped(one, 44)).join('\n');
const widest = (text, font) => Math.max(...text.split('\n').map((line) => textWidth(line, font)));

// Sets the sizes of a node and its chips. The chips stand in one column on the left.
function measure(node) {
  if (node.width) return; // drawn before, in another theme or window
  node.label = wrapped(node.label, 40);
  node.sub = resultLines(node.sub);
  const lines = node.label.split('\n').length + (node.sub ? node.sub.split('\n').length : 0);
  node.width = Math.max(44, Math.ceil(Math.max(widest(node.label, 'label'), widest(node.sub, 'sub'))) + 22);
  node.height = node.pill ? 8 + lines * LINE : 10 + lines * LINE;
  for (const chip of node.chips) {
    chip.width = Math.ceil(textWidth(MARKS[chip.change] + chip.text, 'chip')) + 12;
  }
  node.chipWidth = node.chips.length ? Math.max(...node.chips.map((chip) => chip.width)) + 12 : 0;
  node.right = node.chipWidth <= 64 ? node.chipWidth : 0; // as much on the right keeps chains straight
  node.boxWidth = node.width + node.chipWidth + node.right;
  node.boxHeight = Math.max(node.height, node.chips.length * 18);
}

// Parts of a scene that nothing joins are laid out by themselves and stand in rows, the largest first.
function layout(scene, room) {
  scene.nodes.forEach(measure);
  scene.groups = [...new Set(scene.nodes.map((node) => node.group).filter(Boolean))];
  const pieces = islands(scene).map((nodes) => layoutPiece(nodes, scene.edges));
  let x = 0, y = 0, row = 0, width = 0;
  for (const piece of pieces) {
    if (x && x + piece.width > room) [x, y, row] = [0, y + row, 0];
    shift(piece, x, y);
    x += piece.width;
    row = Math.max(row, piece.height);
    width = Math.max(width, x);
  }
  return {width: width + 2 * MARGIN, height: y + row + 2 * MARGIN};
}

function islands(scene) {
  const parent = new Map(scene.nodes.map((node) => [node.id, node.id]));
  const root = (id) => {
    while (parent.get(id) !== id) id = parent.get(id);
    return id;
  };
  const join = (a, b) => parent.set(root(a), root(b));
  for (const edge of scene.edges) join(edge.a, edge.b);
  const first = new Map();
  for (const node of scene.nodes) {
    if (node.group && first.has(node.group)) join(node.id, first.get(node.group));
    else first.set(node.group, node.id);
  }
  const found = new Map();
  for (const node of scene.nodes) found.set(root(node.id), [...(found.get(root(node.id)) ?? []), node]);
  return [...found.values()].sort((a, b) => b.length - a.length);
}

function layoutPiece(nodes, edges) {
  const graph = new dagre.graphlib.Graph({compound: true});
  graph.setGraph({rankdir: 'TB', nodesep: 18, ranksep: 28, edgesep: 12, marginx: 10, marginy: 10});
  graph.setDefaultEdgeLabel(() => ({}));
  const grouped = nodes.some((node) => node.group);
  for (const group of new Set(nodes.map((node) => node.group).filter(Boolean))) graph.setNode(`g:${group}`, {});
  for (const node of nodes) {
    graph.setNode(node.id, {width: node.boxWidth, height: node.boxHeight});
    if (node.group) graph.setParent(node.id, `g:${node.group}`);
  }
  const own = edges.filter((edge) => graph.hasNode(edge.a));
  for (const edge of own) graph.setEdge(edge.a, edge.b, {});
  dagre.layout(graph);
  for (const node of nodes) setPosition(node, graph.node(node.id));
  for (const edge of own) edge.points = graph.edge(edge.a, edge.b).points;
  const {width, height} = graph.graph();
  return {nodes, edges: own, width, height: height + (grouped ? 12 : 0), top: grouped ? 12 : 0};
}

function shift({nodes, edges, top}, dx, dy) {
  const move = (point) => {
    point.x += dx + MARGIN;
    point.y += dy + top + MARGIN;
  };
  for (const node of nodes) [node, ...node.chips].forEach(move);
  for (const edge of edges) edge.points.forEach(move);
}

// dagre's box holds chips and body; the chips stand on its left.
function setPosition(node, {x, y}) {
  node.x = x + (node.chipWidth - node.right) / 2;
  node.y = y;
  const left = x - node.boxWidth / 2;
  const top = y - (node.chips.length * 18) / 2 + 9;
  node.chips.forEach((chip, number) => {
    chip.x = left + node.chipWidth - 12 - chip.width / 2;
    chip.y = top + number * 18;
  });
}

// Whether a straight line between two nodes runs over no other.
function isFree(edge, at, nodes) {
  const from = at.get(edge.a), to = at.get(edge.b);
  return nodes.every((node) => node === from || node === to || !crosses(from, to, node));
}

// A node with its chips against a line, in steps of 8 pixels: boxes are 22 and more.
function crosses(from, to, node) {
  const left = node.x - node.width / 2 - node.chipWidth - 4, right = node.x + node.width / 2 + 4;
  const top = node.y - node.boxHeight / 2 - 4, bottom = node.y + node.boxHeight / 2 + 4;
  const steps = Math.ceil(Math.hypot(to.x - from.x, to.y - from.y) / 8);
  for (let step = 0; step <= steps; step++) {
    const x = from.x + ((to.x - from.x) * step) / steps, y = from.y + ((to.y - from.y) * step) / steps;
    if (x > left && x < right && y > top && y < bottom) return true;
  }
  return false;
}

// The bends of an edge as cytoscape wants them: along and beside the straight line between its ends.
function bends(points, from, to) {
  const dx = to.x - from.x, dy = to.y - from.y, square = dx * dx + dy * dy;
  const inner = points.slice(1, -1);
  if (!square || !inner.length) return null;
  const length = Math.sqrt(square);
  const weights = inner.map((p) => ((p.x - from.x) * dx + (p.y - from.y) * dy) / square);
  const distances = inner.map((p) => ((p.y - from.y) * dx - (p.x - from.x) * dy) / length);
  return distances.some((d) => Math.abs(d) > 3) ? {weights, distances} : null;
}
