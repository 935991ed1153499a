// Seven columns of items. A click marks everything that the item was made from and everything that it became.

const story = read('story');
const buttons = []; // by the number of an item, those of the graph that is shown
const before = new Map(), after = new Map();
let chosen = null;

for (const [from, to] of story.links) {
  if (!after.has(from)) after.set(from, []);
  if (!before.has(to)) before.set(to, []);
  after.get(from).push(to);
  before.get(to).push(from);
}
for (const item of story.items) {
  const more = (item.more ?? []).map(([name, value]) => (item.c === 7 ? name : `${name} ${value}`)).join(' '); // a key holds whole graphs
  item.key = `${item.name} ${item.text} ${item.line ?? ''} ${item.layer ?? ''} ${more} ${item.c === 1 ? item.code ?? '' : ''}`.toLowerCase();
}

// All that is reached from an item in one direction.
function reached(number, links, found = new Set()) {
  for (const next of links.get(number) ?? []) {
    if (found.has(next)) continue;
    found.add(next);
    reached(next, links, found);
  }
  return found;
}

function button(item) {
  const made = element('button', {class: 'item', type: 'button', 'data-item': String(item.n), 'aria-pressed': 'false', onclick: () => choose(item.n)},
    element('b', {}, item.name), element('span', {}, item.text));
  if (item.line) made.append(element('i', {}, item.c === 1 && item.code ? `${item.line}  ${item.code}` : item.line));
  buttons[item.n] = made;
  return made;
}

// Nodes of one layer of the model are a group; one that has the ops of the group before it is closed.
function fill(holder, items) {
  holder.replaceChildren();
  let group = null, ops = '', last = '';
  for (const item of items) {
    if (!item.layer) {
      if (group) last = ops;
      group = null;
      holder.append(button(item));
      continue;
    }
    if (!group || group.dataset.layer !== item.layer) {
      if (group) last = ops;
      group = element('details', {class: 'layer', 'data-layer': item.layer, open: ''}, element('summary', {}, item.layer));
      ops = '';
      holder.append(group);
    }
    ops += `${item.text} `;
    group.append(button(item));
    group.dataset.ops = ops;
  }
  const seen = new Map();
  for (const one of all('.layer', holder)) {
    const same = seen.get(one.dataset.ops);
    one.firstChild.textContent = `${one.dataset.layer}, ${one.childElementCount - 1} calls${same ? `, as ${same}` : ''}`;
    if (same) one.open = false;
    else seen.set(one.dataset.ops, one.dataset.layer);
  }
  if (!items.length) holder.append(element('p', {}, 'nothing of this graph'));
}

function show(graph) {
  buttons.length = 0;
  for (const column of all('.column')) {
    const number = Number(column.dataset.column);
    fill(column.querySelector('.items'), story.items.filter((item) => item.g === graph && item.c === number));
  }
  choose(null);
  filter();
}

function choose(number) {
  chosen = number === chosen ? null : number;
  const marked = new Set();
  if (chosen !== null) {
    marked.add(chosen);
    for (const one of reached(chosen, before)) marked.add(one);
    for (const one of reached(chosen, after)) marked.add(one);
  }
  byId('columns').classList.toggle('following', chosen !== null);
  buttons.forEach((one, index) => {
    one.classList.toggle('marked', marked.has(index));
    one.classList.toggle('chosen', index === chosen);
    one.setAttribute('aria-pressed', String(index === chosen));
    if (marked.has(index) && one.parentElement.matches('details')) one.parentElement.open = true;
  });
  for (const holder of all('.items')) {
    const first = holder.querySelector('.item.chosen') ?? holder.querySelector('.item.marked');
    if (first && !first.classList.contains('chosen')) holder.scrollTop = first.offsetTop - holder.clientHeight / 3;
  }
  tell(marked);
}

function tell(marked) {
  const item = chosen === null ? null : story.items[chosen];
  byId('shown').hidden = item === null;
  if (item === null) {
    byId('followed').textContent = 'Click a node to follow it from its line to its kernel.';
    return;
  }
  const kernels = [...marked].map((one) => story.items[one]).filter((one) => one.c === 5).map((one) => one.name);
  const lines = [...new Set([...marked].map((one) => story.items[one]).filter((one) => one.c === 1 && one.line).map((one) => one.line))];
  byId('followed').textContent = `${item.name}: ${lines.join(', ') || 'no line'} → ${kernels.join(', ') || 'no kernel'}`;
  byId('shown-name').textContent = item.name;
  const facts = [...(item.line ? [['line', item.line]] : []), ...(item.more ?? [])];
  byId('shown-facts').replaceChildren(...facts.flatMap(([name, value]) => [element('dt', {}, name), element('dd', {}, value)]));
  const source = byId('shown-code');
  source.hidden = !item.code;
  source.replaceChildren(...(item.code ?? '').split('\n').flatMap((line) => [...coloured(line), '\n']));
}

function filter() {
  const words = byId('search').value.toLowerCase().split(/\s+/).filter(Boolean);
  let found = 0;
  buttons.forEach((one, index) => {
    const here = words.every((word) => story.items[index].key.includes(word));
    one.classList.toggle('away', !here);
    if (here) found += 1;
    if (here && words.length && one.parentElement.matches('details')) one.parentElement.open = true;
  });
  byId('count').textContent = words.length ? `${found} found` : `${found} items`;
}

function startStages() {
  const graphs = [...new Set(story.items.map((item) => item.g))];
  byId('graph').replaceChildren(...graphs.map((name) => element('option', {value: name}, name)));
  byId('graph').addEventListener('change', (event) => show(event.target.value));
  byId('search').addEventListener('input', filter);
  document.addEventListener('keydown', (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.target.id === 'search') {
      const first = buttons.find((one) => one && !one.classList.contains('away'));
      if (event.key === 'Enter' && first) { event.preventDefault(); first.click(); first.focus(); }
      if (event.key === 'Escape') { event.target.value = ''; filter(); event.target.blur(); }
      return;
    }
    if (event.key === '/') { event.preventDefault(); byId('search').focus(); }
    if (event.key === 'Escape' && chosen !== null) choose(null);
    if (event.key === 't' && !event.target.matches('select')) nextTheme();
  });
  show(graphs[0] ?? '');
}

startTheme();
startStages();
document.documentElement.dataset.ready = String(Math.round(performance.now()));
