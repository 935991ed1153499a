// The keyboard: everything that a click does.

const KEYS = {
  j: () => stepTransform(1),
  k: () => stepTransform(-1),
  ArrowDown: () => inPipeline() && stepTransform(1),
  ArrowUp: () => inPipeline() && stepTransform(-1),
  '/': () => byId('search').focus(),
  '?': () => byId('help').showModal(),
  t: nextTheme,
  '[': () => moveLayer(-1),
  ']': () => moveLayer(1),
  Escape: closeTransform,
};

// Arrows scroll the page, unless a row of the table has the focus.
const inPipeline = () => Boolean(document.activeElement?.closest('#pipeline tbody'));

function startKeys() {
  document.addEventListener('keydown', (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || byId('help').open) return;
    if (event.target.matches('input, select, textarea')) return;
    const act = KEYS[event.key];
    if (!act || (event.key.startsWith('Arrow') && !inPipeline())) return;
    event.preventDefault();
    act();
  });
  byId('help-open').addEventListener('click', () => byId('help').showModal());
}
