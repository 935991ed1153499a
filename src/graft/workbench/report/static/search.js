// Search over transforms and the nodes of the step that is shown.

const MOST = 40;
let index = null; // built when it is first needed, and again for another step
let indexed = null;

function startSearch() {
  const input = byId('search');
  input.addEventListener('input', () => showHits(input.value));
  input.addEventListener('focus', () => input.value && showHits(input.value));
  input.addEventListener('keydown', (event) => {
    if (event.key === 'ArrowDown' || event.key === 'ArrowUp') {
      event.preventDefault();
      moveHit(event.key === 'ArrowDown' ? 1 : -1);
    } else if (event.key === 'Enter') {
      (byId('hits').querySelector('[aria-selected="true"]') ?? byId('hits').querySelector('[role=option]'))?.click();
    } else if (event.key === 'Escape') {
      event.stopPropagation();
      closeSearch();
      input.blur();
    }
  });
  document.addEventListener('click', (event) => {
    if (!event.target.closest('.search')) closeSearch();
  });
}

function buildIndex() {
  if (indexed === open.step) return index;
  indexed = open.step;
  index = [];
  for (const row of rows()) {
    const name = row.dataset.transform;
    index.push({kind: 'transform', text: name, more: docs[name], key: `${name} ${docs[name]}`.toLowerCase(), go: () => openTransform(name)});
  }
  for (const found of nodesOf(graphs.steps[open.step])) {
    const {node} = found;
    const key = `%${node.name} ${node.op} ${node.module} ${node.source} ${node.madeBy} ${node.parts.join(' ')}`.toLowerCase();
    index.push({kind: 'node', text: `%${node.name}`, more: `${node.op} ${node.module}`, key, go: () => { closeTransform(); showSite(found); }});
  }
  return index;
}

function showHits(text) {
  const words = text.toLowerCase().split(/\s+/).filter(Boolean);
  const found = words.length ? buildIndex().filter((one) => words.every((word) => one.key.includes(word))) : [];
  const list = byId('hits');
  list.replaceChildren(...found.slice(0, MOST).map((hit, number) => element(
    'li', {role: 'option', id: `hit${number}`, 'aria-selected': String(number === 0), onclick: () => follow(hit)},
    element('span', {class: `kind ${hit.kind}`}, hit.kind), element('b', {}, hit.text), element('small', {}, hit.more ?? ''),
  )));
  const more = found.length - MOST;
  if (words.length && more > 0) list.append(element('li', {class: 'more'}, `${more} more`));
  if (words.length && !found.length) list.append(element('li', {class: 'more'}, 'nothing found in this step'));
  list.hidden = !words.length;
  byId('search').setAttribute('aria-expanded', String(!list.hidden));
}

// The keys belong to what was found, no longer to the search.
function follow(hit) {
  closeSearch();
  byId('search').blur();
  hit.go();
}

function moveHit(by) {
  const hits = all('[role=option]', byId('hits'));
  const at = hits.findIndex((hit) => hit.getAttribute('aria-selected') === 'true');
  const next = hits[Math.min(hits.length - 1, Math.max(0, at + by))];
  if (!next) return;
  for (const hit of hits) hit.setAttribute('aria-selected', String(hit === next));
  byId('search').setAttribute('aria-activedescendant', next.id);
  next.scrollIntoView({block: 'nearest'});
}

function closeSearch() {
  byId('hits').hidden = true;
  byId('search').setAttribute('aria-expanded', 'false');
}
