// The pipeline table sorts; a transform opens in the drawer with its diff, its matches and its near misses.

const rows = () => all('#pipeline tbody tr');
let opened = null;

function startTransforms() {
  for (const button of all('[data-open]')) {
    button.addEventListener('click', (event) => {
      event.stopPropagation();
      openTransform(button.dataset.open);
    });
  }
  for (const row of rows()) row.addEventListener('click', () => openTransform(row.dataset.transform));
  for (const head of all('#pipeline th button')) head.addEventListener('click', () => sortBy(head.closest('th')));
  byId('drawer-close').addEventListener('click', closeTransform);
  byId('drawer-before').addEventListener('click', () => stepTransform(-1));
  byId('drawer-after').addEventListener('click', () => stepTransform(1));
  for (const article of all('#drawer article')) startDiff(article);
  for (const button of all('.more-button')) button.addEventListener('click', () => toggleDetail(button));
  addEventListener('hashchange', followHash);
}

// The row under a candidate.
function toggleDetail(button) {
  const row = byId(button.getAttribute('aria-controls'));
  row.hidden = !row.hidden;
  button.setAttribute('aria-expanded', String(!row.hidden));
}

function sortBy(head) {
  const down = head.getAttribute('aria-sort') === 'ascending';
  const column = [...head.parentElement.children].indexOf(head);
  const numeric = head.classList.contains('number');
  for (const other of all('th', head.parentElement)) other.removeAttribute('aria-sort');
  head.setAttribute('aria-sort', down ? 'descending' : 'ascending');
  const value = (row) => row.children[column].dataset.value ?? row.children[column].textContent.trim();
  const compare = (a, b) => (numeric ? Number(value(a)) - Number(value(b)) : value(a).localeCompare(value(b)));
  const body = head.closest('table').tBodies[0];
  body.append(...rows().sort((a, b) => (down ? compare(b, a) : compare(a, b))));
}

function openTransform(name) {
  const article = all('#drawer article').find((one) => one.dataset.transform === name);
  if (!article) return;
  for (const other of all('#drawer article')) other.hidden = other !== article;
  byId('drawer').hidden = false;
  document.body.classList.add('drawn');
  byId('drawer').setAttribute('aria-labelledby', article.querySelector('h2').id);
  for (const row of rows()) row.setAttribute('aria-current', String(row.dataset.transform === name));
  for (const button of all('#pipeline tbody [data-open]')) {
    button.setAttribute('aria-expanded', String(button.dataset.open === name));
  }
  opened = name;
  byId('drawer-position').textContent = `transform ${rows().findIndex((row) => row.dataset.transform === name) + 1} of ${rows().length}`;
  byId('drawer').scrollTop = 0;
  article.querySelector('h2').focus({preventScroll: true});
  rows().find((row) => row.dataset.transform === name)?.scrollIntoView({block: 'nearest'});
  if (graphs.diffs[name]) drawDiff(article);
  history.replaceState(null, '', `#transform=${encodeURIComponent(name)}`);
}

function closeTransform() {
  if (opened === null) return;
  const name = opened;
  opened = null;
  byId('drawer').hidden = true;
  document.body.classList.remove('drawn');
  for (const row of rows()) row.setAttribute('aria-current', 'false');
  for (const button of all('#pipeline tbody [data-open]')) button.setAttribute('aria-expanded', 'false');
  rows().find((row) => row.dataset.transform === name)?.querySelector('[data-open]').focus();
  history.replaceState(null, '', location.pathname + location.search);
}

// The next transform: opened where one is open, else only focused.
function stepTransform(by) {
  const list = rows();
  const focused = list.findIndex((row) => row.contains(document.activeElement));
  const at = opened === null ? focused : list.findIndex((row) => row.dataset.transform === opened);
  const next = list[Math.min(list.length - 1, Math.max(0, at + by))];
  if (!next) return;
  if (opened !== null) openTransform(next.dataset.transform);
  else next.querySelector('[data-open]').focus();
}

function startDiff(article) {
  for (const control of all('[data-view], [data-whole], [data-drawing]', article)) {
    control.addEventListener(control.tagName === 'BUTTON' ? 'click' : 'change', () => {
      if (control.dataset.view) press(control, all('[data-view]', article));
      drawDiff(article);
    });
  }
  for (const control of all('[data-text]', article)) {
    control.addEventListener('click', () => {
      press(control, all('[data-text]', article));
      for (const sides of all('.sides', article)) sides.hidden = control.dataset.text !== 'sides';
      article.querySelector('.diff').hidden = control.dataset.text === 'sides';
    });
  }
}

function press(control, others) {
  for (const other of others) other.setAttribute('aria-pressed', String(other === control));
}

function drawDiff(article) {
  const [holder, second] = all('.drawing', article);
  const chosen = Number(article.querySelector('[data-drawing]')?.value ?? 0);
  const drawing = graphs.diffs[article.dataset.transform][chosen];
  article.querySelector('.node-note').textContent = '';
  const view = article.querySelector('[data-view][aria-pressed="true"]').dataset.view;
  const beside = view === 'beside' && !drawing.large;
  second.hidden = !beside;
  if (drawing.large) {
    drawings.get(holder)?.cy.destroy();
    drawings.delete(holder);
    holder.style.height = '';
    holder.replaceChildren(element('p', {class: 'empty'}, `${drawing.large} nodes are too many for one drawing; the text below has what changed.`));
    return;
  }
  drawSide(article, holder, drawing, beside ? 'before' : view);
  if (beside) drawSide(article, second, drawing, 'after');
}

function drawSide(article, holder, drawing, view) {
  const whole = article.querySelector('[data-whole]').checked;
  draw(holder, diffScene(drawing, view, whole), {
    label: `${drawing.title}, ${view}; as text below`,
    onNode: (node) => {
      if (!node.item) return;
      const {name, op, value, module, source, note: changed} = node.item;
      article.querySelector('.node-note').textContent = [`%${name}`, op, value, module, source].filter(Boolean).join(' · ') + (changed ? `\n${changed}` : '');
    },
  });
}

function followHash() {
  const found = location.hash.match(/^#transform=(.*)$/);
  if (found) openTransform(decodeURIComponent(found[1]));
}
