// Draws a scene into an element with cytoscape. Colour is never alone: removed nodes are cut and dashed, rewired ones
// have two lines.

const drawings = new Map(); // element → what it shows

// least: the smallest zoom that can be read; a larger drawing opens at its top and has a minimap.
function draw(holder, scene, {onNode, label, least = 0.62} = {}) {
  drawings.get(holder)?.cy.destroy();
  drawings.delete(holder);
  if (!scene.nodes.length) {
    holder.replaceChildren(element('p', {class: 'empty'}, 'None of it is in this graph.'));
    return null;
  }
  const size = layout(scene, holder.clientWidth / 0.85);
  const inner = element('div', {class: 'canvas', role: 'img', 'aria-label': label ?? 'graph'});
  holder.replaceChildren(inner);
  if (holder.dataset.grows) holder.style.height = `${Math.ceil(Math.min(size.height * Math.min(1, holder.clientWidth / size.width), innerHeight * 0.7)) + 8}px`;
  const cy = cytoscape({
    container: inner, elements: elements(scene), style: styles(), layout: {name: 'preset'},
    minZoom: 0.02, maxZoom: CLOSEST,
    userZoomingEnabled: false, boxSelectionEnabled: false, autoungrabify: true,
  });
  const known = {cy, holder, scene, size, least, options: {onNode, label, least}};
  drawings.set(holder, known);
  cy.on('tap', 'node.body', (event) => onNode?.(event.target.data('node')));
  cy.on('mouseover', 'node.body', () => (inner.style.cursor = 'pointer'));
  cy.on('mouseout', 'node.body', () => (inner.style.cursor = ''));
  cy.on('dragpan', () => keepInside(known));
  startViewport(holder);
  openView(known);
  startMinimap(known);
  return cy;
}

function redraw(holder) {
  const known = drawings.get(holder);
  if (!known || !holder.clientWidth) return;
  const chosen = known.cy.$(':selected').map((node) => node.id());
  const cy = draw(holder, known.scene, known.options);
  for (const id of chosen) cy.$id(id).select();
}

function elements(scene) {
  const found = scene.groups.map((group) => ({data: {id: `g:${group}`, label: group}, classes: 'group', selectable: false}));
  const at = new Map(scene.nodes.map((node) => [node.id, node]));
  for (const node of scene.nodes) {
    const classes = ['body', node.family, changeClass(node.change), node.stack ? 'stack' : '', node.chosen ? 'chosen' : ''];
    found.push({
      data: {
        id: node.id, label: node.sub ? `${node.label}\n${node.sub}` : node.label, node, w: node.width, h: node.height,
        parent: node.group ? `g:${node.group}` : undefined,
      },
      position: {x: node.x, y: node.y}, classes: classes.join(' '),
    });
    node.chips.forEach((chip, number) => found.push(...chipElements(node, chip, number)));
  }
  for (const [number, edge] of scene.edges.entries()) {
    const bend = edge.points && !isFree(edge, at, scene.nodes) ? bends(edge.points, at.get(edge.a), at.get(edge.b)) : null;
    found.push({
      data: {id: `e${number}`, source: edge.a, target: edge.b, ...(bend ?? {})},
      classes: `${changeClass(edge.change)} ${bend ? 'bent' : ''}`,
    });
  }
  return found;
}

function chipElements(node, chip, number) {
  const id = `${node.id}:chip${number}`;
  const kind = ['value', 'hub', 'weight', 'input'][chip.kind];
  return [
    {
      data: {id, label: MARKS[chip.change] + chip.text, w: chip.width, parent: node.group ? `g:${node.group}` : undefined},
      position: {x: chip.x, y: chip.y}, classes: `chip ${kind} ${changeClass(chip.change)}`, selectable: false,
    },
    {data: {id: `${id}e`, source: id, target: node.id}, classes: `port ${changeClass(chip.change)}`},
  ];
}

const changeClass = (change) => ['', 'removed', 'added', 'rewired', 'other'][change];

function styles() {
  const ink = colour('ink'), muted = colour('muted'), line = colour('edge'), surface = colour('surface');
  const tint = (name) => ({selector: `node.${name}`, style: {'background-color': colour(`f-${name}`), 'border-color': colour(`b-${name}`)}});
  const changed = (name, shape, border, width) => ({
    selector: `node.${name}`,
    style: {
      shape, 'border-style': border, 'border-width': width, 'border-color': colour(name), color: colour(name),
      'background-color': colour(`${name}-soft`),
    },
  });
  const arrow = (name, style) => ({
    selector: `edge.${name}`,
    style: {'line-color': colour(name), 'target-arrow-color': colour(name), 'line-style': style, width: 2, 'z-index': 5},
  });
  return [
    {
      selector: 'node.body',
      style: {
        shape: 'round-rectangle', width: 'data(w)', height: 'data(h)', label: 'data(label)', color: ink,
        'text-valign': 'center', 'text-halign': 'center', 'text-wrap': 'wrap', 'text-max-width': 400,
        'font-family': 'system-ui, sans-serif', 'font-size': 11.5, 'line-height': 1.25,
        'background-color': surface, 'border-width': 1, 'border-color': line, 'corner-radius': 6,
      },
    },
    tint('plain'), tint('move'), tint('matmul'), tint('attention'), tint('fused'), tint('layer'), tint('edge'),
    {selector: 'node.pill', style: {'background-color': surface, 'border-style': 'dotted', 'border-color': muted, color: muted, 'corner-radius': 11, 'font-size': 10.5}},
    {selector: 'node.stack', style: {ghost: 'yes', 'ghost-offset-x': 4, 'ghost-offset-y': 4, 'ghost-opacity': 0.35}},
    {
      selector: 'node.group',
      style: {
        shape: 'round-rectangle', 'background-color': colour('group'), 'background-opacity': 0.5, 'border-width': 1,
        'border-color': line, 'border-opacity': 0.5, label: 'data(label)', color: muted, 'font-size': 11, 'font-weight': 600,
        'text-halign': 'center', 'text-valign': 'top', 'text-margin-y': -3, 'text-margin-x': (group) => textWidth(group.data('label'), 'group') / 2 - group.width() / 2, padding: 10, 'text-background-color': surface, 'text-background-opacity': 0.85, 'text-background-padding': 2, 'font-family': 'system-ui, sans-serif',
      },
    },
    {
      selector: 'node.chip',
      style: {
        shape: 'round-rectangle', width: 'data(w)', height: 15, label: 'data(label)', 'font-size': 10, color: muted,
        'text-valign': 'center', 'text-halign': 'center', 'background-color': surface, 'border-width': 0.75,
        'border-color': line, 'corner-radius': 7, 'font-family': 'system-ui, sans-serif', events: 'no',
      },
    },
    {selector: 'node.chip.hub', style: {color: colour('accent'), 'border-color': colour('accent')}},
    {selector: 'node.chip.weight', style: {shape: 'rectangle'}},
    {
      selector: 'edge',
      style: {
        width: 1.25, 'line-color': line, 'target-arrow-color': line, 'target-arrow-shape': 'triangle', 'arrow-scale': 0.7,
        'curve-style': 'straight', events: 'no',
      },
    },
    {
      selector: 'edge.bent',
      style: {
        'curve-style': 'round-segments', 'segment-distances': 'data(distances)', 'segment-weights': 'data(weights)',
        'segment-radii': 12, 'edge-distances': 'node-position',
      },
    },
    {selector: 'edge.port', style: {'curve-style': 'straight', 'target-arrow-shape': 'none', width: 0.75}},
    changed('removed', 'cut-rectangle', 'dashed', 2), changed('added', 'round-rectangle', 'solid', 2.5),
    changed('rewired', 'round-rectangle', 'double', 4), changed('other', 'round-rectangle', 'dotted', 2),
    arrow('removed', 'dashed'), arrow('added', 'solid'), arrow('rewired', 'solid'),
    {selector: 'node.chosen', style: {'border-width': 2.5, 'border-color': colour('accent')}},
    {selector: 'node.body:selected', style: {'border-width': 3, 'border-color': colour('accent'), 'border-style': 'solid'}},
  ];
}
