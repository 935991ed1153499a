// Scenes: what is drawn. {nodes: [{id, label, sub, family, group, change, chips, pill, stack, item}], edges}.
// Hubs, weights and inputs are chips on their readers, not edges.

const SAME = 0, REMOVED = 1, ADDED = 2, REWIRED = 3, OTHER = 4;
const VALUE = 0, HUB = 1, WEIGHT = 2, INPUT = 3;
const NAMED = 2; // ports of a box that the overview names; the open part names all
const MARKS = ['', '− ', '+ ', '~ ', '≈ '];
const MATMULS = /^(linear|matmul|mm|bmm|addmm|baddbmm|fused_linear|einsum|moe_experts|conv1d)/;
const MOVES = /^(reshape|view|transpose|permute|slice|select|cat|expand|unsqueeze|squeeze|getitem|to|clone|contiguous|sym_)/;

const shortOp = (op) => op.split('.')[1] ?? op;

function family(node) {
  const name = shortOp(node.op);
  if (node.op === 'input' || node.op === 'weight' || node.op === 'output') return 'edge';
  if (/attention/.test(name)) return 'attention';
  if (MATMULS.test(name)) return 'matmul';
  if (node.op.startsWith('graft.')) return 'fused';
  return MOVES.test(name) ? 'move' : 'plain';
}

// The module inside the layer: `model.layers.*.self_attn.q_proj` → `self_attn`.
function groupOf(node) {
  const inside = node.general.split('*.')[1];
  return inside && (node.op !== 'weight' || inside.split('.').length > 2) ? inside.split('.')[0] : null;
}

const lastTwo = (path) => path.split('.').slice(-2).join('.');

// A merged weight by the names of its parts: `q_proj + k_proj + v_proj`; of very many the first ones and their number.
function partNames(parts) {
  const names = parts.map((part) => part.split('.').at(-2) ?? part);
  const equal = names.every((name) => name === names[0]);
  const told = equal ? parts.map((part) => part.split('.').slice(-3, -1).join('.')) : names;
  return told.length > 6 ? `${told.slice(0, 2).join(' + ')} + … (${told.length})` : told.join(' + ');
}

const weightName = (weight) => (weight.parts?.length ? `${partNames(weight.parts)} .${weight.module.split('.').at(-1)}` : lastTwo(weight.module));

// A size is known by what it counts (`tokens`), all else by its name.
const portName = (node) => (node.value && !node.value.includes('[') ? node.value : node.name);

// The weight of a node's own module goes without saying: the node is named after the module.
const ownWeight = (weight, reader) => weight.module.startsWith(`${reader.module}.`) || (weight.parts.length > 0 && family(reader) === 'matmul');

// `linear · q_proj`: the module, where it is not the group's that is drawn around it.
function callLabel(node) {
  if (node.parts.length && family(node) === 'matmul') return `${shortOp(node.op)} · ${partNames(node.parts)}`;
  const last = node.general.split('.').at(-1);
  const named = last && last !== '*' && last !== groupOf(node) && family(node) === 'matmul';
  return shortOp(node.op) + (named ? ` · ${last}` : '');
}

function drawnNode(id, node, change = SAME) {
  const leaf = node.op === 'weight' || node.op === 'input';
  const label = node.op === 'weight' ? weightName(node) : node.op === 'input' ? node.name : callLabel(node);
  return {
    id, label: MARKS[change] + label, sub: node.value, family: family(node), group: groupOf(node), change,
    chips: [], item: node, leaf,
  };
}

// A value from elsewhere with an edge of its own, or one that is read elsewhere.
function addPill(scene, id, label) {
  const known = scene.nodes.some((node) => node.id === id);
  if (!known) scene.nodes.push({id, label, sub: '', family: 'pill', group: null, change: SAME, chips: [], pill: true});
  return id;
}

function addChip(node, text, kind, change = SAME) {
  const known = node.chips.find((chip) => chip.text === text);
  if (!known) node.chips.push({text, kind, change});
}

function partScene(opened) {
  const scene = {nodes: [], edges: []};
  const drawn = new Map();
  const alone = opened.nodes.every((node) => node.inputs.length === 0);
  opened.nodes.forEach((node, position) => {
    if (node.op === 'weight' && !alone) return;
    const made = drawnNode(`n${position}`, node);
    drawn.set(position, made);
    scene.nodes.push(made);
  });
  for (const [position, target] of drawn) {
    for (const input of opened.nodes[position].inputs) readInto(scene, opened, drawn, target, input);
    if (opened.nodes[position].elsewhere) readElsewhere(scene, target);
  }
  return scene;
}

function readInto(scene, opened, drawn, target, input) {
  const source = input.outer ?? opened.nodes[input.position];
  if (input.outer) {
    if (source.kind !== VALUE) return addChip(target, source.port, source.kind);
    return addEdge(scene, addPill(scene, `in:${source.name}`, `${source.name} from ${source.from}`), target.id, SAME);
  }
  if (!drawn.has(input.position)) return ownWeight(source, target.item) || addChip(target, weightName(source), WEIGHT);
  if (source.hub) return addChip(target, portName(source), HUB);
  return addEdge(scene, drawn.get(input.position).id, target.id, SAME);
}

function readElsewhere(scene, node) {
  if (node.item.hub || node.leaf) return;
  addEdge(scene, node.id, addPill(scene, `out:${node.id}`, 'read elsewhere'), SAME);
}

function addEdge(scene, a, b, change) {
  if (!scene.edges.some((edge) => edge.a === a && edge.b === b)) scene.edges.push({a, b, change});
}

// view: 'both', 'before' or 'after'. whole: all of the layer, or what changed with its neighbours.
function diffScene(drawing, view, whole) {
  const hidden = (change) => (view === 'before' && change === ADDED) || (view === 'after' && change === REMOVED);
  const nodes = drawing.nodes.map((packed) => ({...unpack(packed, drawing.layer), change: packed[CHANGE], note: packed[NOTE]}));
  const shown = shownPositions(drawing, nodes, whole).filter((position) => !hidden(nodes[position].change));
  const scene = {nodes: [], edges: []};
  const drawn = new Map();
  for (const position of shown) {
    const node = nodes[position];
    if (node.op === 'weight' && node.change === SAME) continue;
    const made = drawnNode(`n${position}`, node, node.change);
    if (!whole) made.group = null; // a group around two far nodes would be mostly empty
    const times = (drawing.times ?? {})[position];
    if (times) made.label += ` × ${times}`;
    made.stack = Boolean(times);
    drawn.set(position, made);
    scene.nodes.push(made);
  }
  for (const [a, b, change] of drawing.edges) {
    if (hidden(change) || !drawn.has(b)) continue;
    if (drawn.has(a) && !drawing.hubs.includes(a)) addEdge(scene, `n${a}`, `n${b}`, change);
    else if (nodes[a].op === 'weight') {
      if (change !== SAME || !ownWeight(nodes[a], nodes[b])) addChip(drawn.get(b), weightName(nodes[a]), WEIGHT, change);
    }
    else if (drawing.hubs.includes(a)) addChip(drawn.get(b), portName(nodes[a]), HUB, change);
  }
  for (const [to, name, kind, change] of drawing.outer) {
    if (hidden(change) || !drawn.has(to)) continue;
    if (kind !== VALUE) addChip(drawn.get(to), name, kind, change);
    else addEdge(scene, addPill(scene, `in:${name}`, name), `n${to}`, change);
  }
  return scene;
}

function shownPositions(drawing, nodes, whole) {
  const every = nodes.map((_, position) => position);
  if (whole) return every;
  const changed = new Set(every.filter((position) => nodes[position].change !== SAME));
  const near = new Set(changed);
  for (const [a, b] of drawing.edges) {
    if (changed.has(a)) near.add(b);
    if (changed.has(b)) near.add(a);
  }
  return every.filter((position) => near.has(position));
}

function overviewScene(step, chosen) {
  const scene = {nodes: [], edges: []};
  step.boxes.forEach(([number, title, layers, ports, inputs], position) => {
    const part = step.parts[number];
    const calls = part.nodes.filter((node) => graphs.strings[node[1]] !== 'weight').length;
    const single = calls === 1 && !layers.length;
    const sub = single ? shortOp(graphs.strings[part.nodes.find((n) => graphs.strings[n[1]] !== 'weight')[1]])
      : `${calls} node${calls === 1 ? '' : 's'}${layers.length > 1 ? ' each' : ''}`;
    const node = {
      id: `b${position}`, label: title + (layers.length > 1 ? ` × ${layers.length}` : ''), sub: title === sub ? '' : sub,
      family: layers.length ? 'layer' : title === 'inputs' || title === 'output' ? 'pill' : 'plain', group: null,
      change: SAME, chips: [], box: position, stack: layers.length > 1, chosen: position === chosen,
    };
    for (const [names, kind, what] of [[ports, HUB, 'ports'], [inputs, INPUT, 'inputs']]) {
      if (names.length > NAMED) addChip(node, `${names.length} ${what}`, kind);
      else names.forEach((name) => addChip(node, name, kind));
    }
    scene.nodes.push(node);
  });
  for (const [a, b] of step.edges) addEdge(scene, `b${a}`, `b${b}`, SAME);
  return scene;
}
