// Code beside the graph: a click on a node shows the model's line that made it and the kernels that run it; a click on a
// line marks the nodes that came from it.

let tab = 'python';
let shownNode = null;

const TABS = {
  python: {title: 'Python', blocks: pythonBlocks, none: 'The run holds no line of the model\'s Python for these nodes.'},
  triton: {title: 'Triton', blocks: (node) => machineBlocks(node, 'Triton'), none: 'It has no Triton kernel: torch runs it with its own.'},
  cpp: {title: 'C++', blocks: (node) => machineBlocks(node, 'C++'), none: 'It has no C++ of its own.'},
};

function startCode() {
  const bar = byId('code-tabs');
  for (const [name, {title}] of Object.entries(TABS)) {
    bar.append(element('button', {type: 'button', 'data-tab': name, 'aria-pressed': String(name === tab), onclick: () => showTab(name)}, title));
  }
}

function showTab(name) {
  tab = name;
  for (const button of all('[data-tab]')) button.setAttribute('aria-pressed', String(button.dataset.tab === name));
  showCode(shownNode);
}

// node: of the open part, or null for none. Blocks: {title, note, first, text, chosen: [[first, last], …], go: line → positions}.
function showCode(node) {
  shownNode = node;
  const {blocks, none} = TABS[tab];
  const found = blocks(node);
  const holder = byId('code');
  const why = node === null && tab !== 'python' && !found.length ? 'Click a node to see what runs it.' : none;
  holder.replaceChildren(...(found.length ? found.map(codeBlock) : [element('p', {class: 'empty'}, why)]));
  const chosen = holder.querySelector('.chosen');
  holder.scrollTop = chosen ? chosen.offsetTop - holder.clientHeight / 3 : 0;
}

function codeBlock({title, note, first, text, chosen, go}) {
  const pre = element('pre', {});
  text.split('\n').forEach((line, at) => {
    const number = first + at;
    const sites = go?.(number) ?? [];
    const inside = chosen?.some(([from, to]) => number >= from && number <= to);
    const made = element('span', {
      class: `line${inside ? ' chosen' : ''}${sites.length ? ' linked' : ''}`, 'data-line': number,
      ...(sites.length ? {role: 'button', tabindex: '0', onclick: () => goTo(sites), title: `${sites.length} node${sites.length > 1 ? 's' : ''}`} : {}),
    }, ...coloured(line), '\n');
    if (sites.length) made.addEventListener('keydown', (event) => event.key === 'Enter' && goTo(sites));
    pre.append(made);
  });
  return element('div', {class: 'block'}, element('h5', {}, title, ...(note ? [element('small', {}, ` ${note}`)] : [])), pre);
}

// Where a name or a line of this step is: in the open part, else in the first one that has it.
function sitesOf(test) {
  const own = open.part.nodes.flatMap((node, position) => (test(node) ? [{position}] : []));
  return own.length ? own : [...linesElsewhere(test)];
}

function* linesElsewhere(test) {
  for (const site of stepNodes()) {
    if (test(site.node)) {
      yield site;
      return;
    }
  }
}

// Every node of the step, listed once for each step.
let listed = null;
function stepNodes() {
  if (listed?.step !== open.step) listed = {step: open.step, nodes: [...nodesOf(graphs.steps[open.step])]};
  return listed.nodes;
}

// Marks nodes of the open part, or opens the part that has the node.
function goTo(sites) {
  if (sites[0].number === undefined) selectNodes(open.part, sites.map((site) => site.position));
  else showSite(sites[0]);
}

function pythonBlocks(node) {
  const [file, line] = (node?.source ?? '').split(':');
  const files = code.sources.filter((one) => (node ? one.file === file : true));
  return files.flatMap((one) => one.blocks.map(([first, text]) => ({
    title: `${one.path}:${first}`, note: one.note, first, text, chosen: node ? [[Number(line), Number(line)]] : null,
    go: (number) => (one.lines.includes(number) ? sitesOf((other) => other.source === `${one.file}:${number}`) : []),
  })));
}

function kernelBlocks(node, title) {
  const kernels = (code.ops[node?.op] ?? []).filter((kernel) => kernel.title === title);
  return kernels.map(({file, text}) => ({title: file, note: `runs ${node.op}`, first: 1, text, chosen: null}));
}

// What was generated whole, where there is some, with the lines of the node marked; and the op's kernels. What has the
// node comes first.
function machineBlocks(node, title) {
  const last = open.step === graphs.steps.length - 1;
  const whole = code.generated.filter((one) => one.title === title).map(({file, text, nodes}) => ({
    title: file, note: `generated for the last graph${last ? '' : ', not for this one'}`, first: 1, text,
    chosen: (last && node && nodes[node.name]) || null, go: last ? linesOf(nodes) : null,
  }));
  const kernels = kernelBlocks(node, title);
  return whole.some((block) => block.chosen) ? [...whole, ...kernels] : [...kernels, ...whole];
}

// The nodes behind a line that begins the code of some.
function linesOf(nodes) {
  const begins = new Map();
  for (const [name, spans] of Object.entries(nodes)) {
    for (const [first] of spans) begins.set(first, [...(begins.get(first) ?? []), name]);
  }
  return (number) => (begins.has(number) ? sitesOf((other) => begins.get(number).includes(other.name)) : []);
}
