// The layer graph: an overview on the left, one open layer or module on the right.

const open = {step: 0, box: 0, layer: null, part: null};

function startLayers() {
  const select = byId('step');
  graphs.steps.forEach((step, number) => {
    const text = number ? `after ${step.name}` : 'as captured';
    select.append(element('option', {value: number}, `${text} · ${step.nodes} nodes`));
  });
  select.addEventListener('change', () => showStep(Number(select.value)));
  byId('layer-before').addEventListener('click', () => moveLayer(-1));
  byId('layer-after').addEventListener('click', () => moveLayer(1));
  showStep(graphs.steps.length - 1);
}

function showStep(number) {
  const step = graphs.steps[number];
  open.step = number;
  byId('step').value = number;
  byId('said').textContent = step.said;
  const most = Math.max(...step.boxes.map((box) => box[2].length));
  showBox(step.boxes.findIndex((box) => box[2].length === most));
}

function showBox(number, layer = null) {
  const step = graphs.steps[open.step];
  const layers = step.boxes[number][2];
  open.box = number;
  open.layer = layers.length ? (layer ?? layers[0]) : null;
  draw(byId('overview'), overviewScene(step, number), {
    label: `Overview: ${step.said}`, onNode: (node) => showBox(node.box),
  });
  showPart();
}

function showPart(chosen = null) {
  const step = graphs.steps[open.step];
  const [number, title] = step.boxes[open.box];
  const opened = openPart(step, number, open.layer);
  const equal = step.parts[number].copies.length + 1;
  const times = equal > 1 ? ` · one of ${equal} equal layers` : '';
  byId('part-title').textContent = opened.layer === null ? title : `${opened.title}${times}`;
  for (const id of ['layer-before', 'layer-after']) byId(id).hidden = allLayers(step).length < 2;
  open.part = opened;
  draw(byId('inside'), partScene(opened), {
    label: `${opened.title}: ${opened.nodes.length} nodes, as text below`,
    onNode: (node) => node.item && chooseNode(opened, node.item),
  });
  listNodes(opened);
  byId('node').hidden = true;
  if (chosen !== null) selectNodes(opened, [chosen]);
  else showCode(null);
}

// Facts on a node above, the code that made it and that runs it beside.
function chooseNode(opened, node) {
  showNode(opened, node);
  showCode(node);
}

// Marks nodes of the open part, by their positions, and shows the first.
function selectNodes(opened, positions) {
  const known = drawings.get(byId('inside'));
  chooseNode(opened, opened.nodes[positions[0]]);
  if (!known) return;
  known.cy.$(':selected').unselect();
  const found = positions.map((position) => known.cy.$id(`n${position}`)).filter((node) => node.length);
  for (const node of found) node.select();
  if (found.length) centreOn(known, found[0].position());
}

const allLayers = (step) => step.boxes.flatMap((box, position) => box[2].map((layer) => ({position, layer})));

function moveLayer(by) {
  const layers = allLayers(graphs.steps[open.step]);
  const at = layers.findIndex((one) => one.position === open.box && one.layer === open.layer);
  const next = layers[(at + by + layers.length) % layers.length];
  if (next) showBox(next.position, next.layer);
}

// Opens the part that a node of the current step is in.
function showSite({number, layer, position}) {
  const step = graphs.steps[open.step];
  const box = step.boxes.findIndex((one) => (layer === null ? one[0] === number : one[0] === number && one[2].includes(layer)));
  showBox(box, layer);
  showPart(position);
  byId('layers').scrollIntoView({block: 'start'});
  byId('inside').focus({preventScroll: true});
}

function showNode(opened, node) {
  const panel = byId('node');
  const readers = opened.nodes.filter((one) => one.inputs.some((input) => opened.nodes[input.position] === node));
  const facts = [
    ['op', node.op], ['value', node.value], ['module', node.module], ['merged from', node.parts.join(', ')],
    ['source', node.source], ['made by', node.madeBy],
    ['reads', node.inputs.map((input) => `${input.slot} %${(input.outer ?? opened.nodes[input.position]).name}`).join(', ')],
    ['literals', node.literals],
    ['read by', readers.map((one) => `%${one.name}`).concat(node.elsewhere ? ['nodes elsewhere'] : []).join(', ')],
  ];
  panel.replaceChildren(element('h4', {}, `%${node.name}`), factList(facts));
  panel.hidden = false;
}

function factList(facts) {
  const list = element('dl', {class: 'facts'});
  for (const [name, value] of facts) if (value) list.append(element('dt', {}, name), element('dd', {}, value));
  return list;
}

// The same nodes as text: what a screen reader reads and a person copies.
function listNodes(opened) {
  byId('nodes').textContent = opened.nodes.map((node) => {
    const inputs = node.inputs.map((input) => `${input.slot}=%${(input.outer ?? opened.nodes[input.position]).name}`);
    const call = node.op === 'weight' ? `self.${node.module}`
      : node.op === 'input' ? 'input' : `${node.op}(${[...inputs, node.literals].filter(Boolean).join(', ')})`;
    const origin = [node.op === 'weight' ? '' : node.module, node.source, node.madeBy].filter(Boolean).join(' | ');
    return `%${node.name} = ${call}${node.value ? ` : ${node.value}` : ''}${origin ? `    # ${origin}` : ''}`;
  }).join('\n');
}
