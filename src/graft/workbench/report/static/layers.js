// The layer graph: an overview on the left, one open layer or module on the right.

const open = {step: 0, box: 0, layer: null};

function startLayers() {
  const select = byId('step');
  graphs.steps.forEach((step, number) => {
    const text = number ? `after ${step.name}` : 'as captured';
    select.append(element('option', {value: number}, `${text} · ${step.nodes} nodes`));
  });
  select.addEventListener('change', () => showStep(Number(select.value)));
  byId('layer-before').addEventListener('click', () => moveLayer(-1));
  byId('layer-after').addEventListener('click', () => moveLayer(1));
  for (const button of all('[data-zoom]')) {
    button.addEventListener('click', () => {
      const holder = button.dataset.for ? byId(button.dataset.for) : button.closest('article').querySelector('.drawing');
      const zoom = (drawings.get(holder)?.options.zoom ?? 1) * Number(button.dataset.zoom);
      redraw(holder, {zoom: Math.min(2, Math.max(0.4, zoom))});
    });
  }
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
    label: `Overview: ${step.said}`, onNode: (node) => showBox(node.box), least: 0.6, zoom: drawings.get(byId('overview'))?.options.zoom,
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
  const holder = byId('inside');
  const scene = partScene(opened);
  const cy = draw(holder, scene, {
    label: `${opened.title}: ${opened.nodes.length} nodes, as text below`,
    onNode: (node) => node.item && showNode(opened, node.item), zoom: drawings.get(holder)?.options.zoom,
  });
  listNodes(opened);
  byId('node').hidden = true;
  if (chosen !== null) selectNode(cy, holder, opened, chosen);
}

function selectNode(cy, holder, opened, place) {
  showNode(opened, opened.nodes[place]);
  const found = cy.$id(`n${place}`);
  if (!found.length) return;
  found.select();
  const at = found.renderedPosition();
  holder.scrollTo({left: at.x - holder.clientWidth / 2, top: at.y - holder.clientHeight / 2});
}

const allLayers = (step) => step.boxes.flatMap((box, place) => box[2].map((layer) => ({place, layer})));

function moveLayer(by) {
  const layers = allLayers(graphs.steps[open.step]);
  const at = layers.findIndex((one) => one.place === open.box && one.layer === open.layer);
  const next = layers[(at + by + layers.length) % layers.length];
  if (next) showBox(next.place, next.layer);
}

// Opens the part that a node of the current step is in.
function showPlace({number, layer, place}) {
  const step = graphs.steps[open.step];
  const box = step.boxes.findIndex((one) => (layer === null ? one[0] === number : one[0] === number && one[2].includes(layer)));
  showBox(box, layer);
  showPart(place);
  byId('layers').scrollIntoView({block: 'start'});
  byId('inside').focus({preventScroll: true});
}

function showNode(opened, node) {
  const panel = byId('node');
  const readers = opened.nodes.filter((one) => one.inputs.some((input) => opened.nodes[input.place] === node));
  const facts = [
    ['op', node.op], ['value', node.value], ['module', node.module], ['source', node.source], ['made by', node.madeBy],
    ['reads', node.inputs.map((input) => `${input.slot} %${(input.outer ?? opened.nodes[input.place]).name}`).join(', ')],
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
    const inputs = node.inputs.map((input) => `${input.slot}=%${(input.outer ?? opened.nodes[input.place]).name}`);
    const call = node.op === 'weight' ? `self.${node.module}`
      : node.op === 'input' ? 'input' : `${node.op}(${[...inputs, node.literals].filter(Boolean).join(', ')})`;
    const origin = [node.op === 'weight' ? '' : node.module, node.source, node.madeBy].filter(Boolean).join(' | ');
    return `%${node.name} = ${call}${node.value ? ` : ${node.value}` : ''}${origin ? `    # ${origin}` : ''}`;
  }).join('\n');
}
