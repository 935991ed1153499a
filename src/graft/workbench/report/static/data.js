// What the page carries: graphs by step, drawings of changes by transform, and the texts that they refer to by number.

const graphs = read('graphs');
const docs = read('docs');
const code = read('code-data');

// What stands behind the eight texts of a packed node, in a part of a step and in a drawing of changes.
const INPUTS = 8, ELSEWHERE = 9, PORT = 10, CHANGE = 8, NOTE = 9;

// [name, op, value, module, source, made by, literals, parts] with the layer's number where `*` stands.
function unpack(packed, layer) {
  const [op, value, module, source, madeBy, literals, parts] = packed.slice(1, 8).map((number) => graphs.strings[number]);
  const named = (text) => (layer === null || layer === undefined ? text : text.replaceAll('*', layer));
  return {
    name: packed[0], op, value: value.replaceAll('@meta', ''), general: module, source, madeBy, literals,
    module: named(module), parts: parts ? named(parts).split(' + ') : [],
  };
}

// One part of a step, or one of the layers that are equal to it: `index` is the number of that layer.
function openPart(step, number, index) {
  const part = step.parts[number];
  const copy = part.copies.find((one) => one[0] === index);
  const layer = part.layer ? (copy ? copy[0] : part.layer[1]) : null;
  const outer = part.outer.map(([name, kind, from, port], position) => {
    const own = copy ? copy[2][position] : name;
    return {name: own, port: own === name ? graphs.strings[port] : own, kind, from: copy && own !== name ? above(graphs.strings[from], part.layer[1], layer) : graphs.strings[from]};
  });
  const nodes = part.nodes.map((packed, position) => {
    const node = unpack(packed, layer);
    if (copy) node.name = copy[1][position];
    const inputs = packed[INPUTS];
    node.inputs = [];
    for (let at = 0; at < inputs.length; at += 2) {
      const to = inputs[at + 1];
      node.inputs.push({slot: graphs.strings[inputs[at]], position: to, outer: to < 0 ? outer[-1 - to] : null});
    }
    node.elsewhere = Boolean(packed[ELSEWHERE]);
    node.hub = Boolean(packed[PORT]);
    return node;
  });
  return {number, layer, title: layer === null ? part.title : `layer ${layer}`, nodes, outer};
}

// What layer 1 reads from layer 0, layer 10 reads from layer 9; and what layer 0 reads, the others read from above.
function above(from, drawn, layer) {
  const found = from.match(/^layer (\d+)$/);
  return `layer ${found ? Number(found[1]) + layer - drawn : layer - 1}`;
}

// Every node of a step with where it is, for the search.
function* nodesOf(step) {
  for (const [number, part] of step.parts.entries()) {
    const first = part.layer ? part.layer[1] : null;
    for (const layer of [first, ...part.copies.map((copy) => copy[0])]) {
      const opened = openPart(step, number, layer);
      for (const [position, node] of opened.nodes.entries()) yield {node, number, layer, position};
    }
  }
}
