// A drawing in its window: dragging and the wheel move it, Ctrl with the wheel and the buttons zoom, "fit" shows all.
// It can never be lost: some of it is always in the window, and all of it where it is smaller.

const CLOSEST = 2.5, SMALLEST = 0.5, SLACK = 24;
let scrolled = -Infinity; // when the page itself last scrolled: a wheel that moves the page goes on moving it
addEventListener('scroll', () => (scrolled = performance.now()), {passive: true});

// The zoom at which all of a drawing is in its window.
const fitZoom = ({holder, size}) => Math.min(1, (holder.clientWidth - 4) / size.width, (holder.clientHeight - 4) / size.height);

// As it opens: all of it where that can be read, else its top in the full width, or as much as can be read.
function openView(known) {
  const {cy, holder, size, scene, least} = known;
  const whole = fitZoom(known);
  const wide = Math.min(1, (holder.clientWidth - 4) / size.width);
  const zoom = whole >= least ? whole : wide >= SMALLEST ? wide : least;
  const first = scene.nodes.reduce((top, node) => (node.y < top.y ? node : top), scene.nodes[0]);
  cy.zoom(zoom);
  cy.pan({x: holder.clientWidth / 2 - first.x * zoom, y: 0});
  keepInside(known);
}

function fitView(known) {
  known.cy.zoom(fitZoom(known));
  known.cy.pan({x: 0, y: 0});
  keepInside(known);
}

function zoomBy(known, factor, at = null) {
  const {cy, holder} = known;
  const centre = at ?? {x: holder.clientWidth / 2, y: holder.clientHeight / 2};
  const least = Math.min(fitZoom(known), SMALLEST);
  const level = Math.min(CLOSEST, Math.max(least, cy.zoom() * factor));
  cy.zoom({level, renderedPosition: centre});
  keepInside(known);
}

// Whether it moved: at its end the page scrolls instead.
function moveBy(known, dx, dy) {
  const before = {...known.cy.pan()};
  known.cy.panBy({x: dx, y: dy});
  keepInside(known);
  const after = known.cy.pan();
  return Math.abs(after.x - before.x) + Math.abs(after.y - before.y) > 0.5;
}

function keepInside({cy, holder, size}) {
  const zoom = cy.zoom(), pan = cy.pan();
  const within = (value, length, room) => (length <= room ? (room - length) / 2 : Math.min(SLACK, Math.max(room - length - SLACK, value)));
  const x = within(pan.x, size.width * zoom, holder.clientWidth);
  const top = size.height * zoom <= holder.clientHeight ? 0 : within(pan.y, size.height * zoom, holder.clientHeight);
  if (x !== pan.x || top !== pan.y) cy.pan({x, y: top});
}

function centreOn({cy, holder, ...known}, {x, y}) {
  cy.pan({x: holder.clientWidth / 2 - x * cy.zoom(), y: holder.clientHeight / 2 - y * cy.zoom()});
  keepInside({cy, holder, ...known});
}

function onWheel(event) {
  const known = drawings.get(event.currentTarget);
  if (!known) return;
  if (event.ctrlKey || event.metaKey) {
    const box = known.holder.getBoundingClientRect();
    event.preventDefault();
    zoomBy(known, Math.exp(-event.deltaY / 300), {x: event.clientX - box.x, y: event.clientY - box.y});
  } else if (performance.now() - scrolled > 250) {
    const [dx, dy] = event.shiftKey ? [event.deltaY, 0] : [event.deltaX, event.deltaY];
    if (moveBy(known, -dx, -dy)) event.preventDefault();
  }
}

const VIEW_KEYS = {
  ArrowUp: (known) => moveBy(known, 0, 60), ArrowDown: (known) => moveBy(known, 0, -60),
  ArrowLeft: (known) => moveBy(known, 60, 0), ArrowRight: (known) => moveBy(known, -60, 0),
  '+': (known) => zoomBy(known, 1.25), '-': (known) => zoomBy(known, 0.8), 0: fitView,
};

function onViewKey(event) {
  const known = drawings.get(event.currentTarget), act = VIEW_KEYS[event.key];
  if (!known || !act || event.ctrlKey || event.metaKey || event.altKey) return;
  event.preventDefault();
  event.stopPropagation();
  act(known);
}

function startViewport(holder) {
  if (holder.dataset.viewport) return;
  holder.dataset.viewport = 'on';
  holder.addEventListener('wheel', onWheel, {passive: false});
  holder.addEventListener('keydown', onViewKey);
}

// The buttons − + fit beside a drawing.
function startZoomButtons() {
  for (const button of all('[data-zoom]')) {
    button.addEventListener('click', () => {
      const holders = button.dataset.for ? [byId(button.dataset.for)] : all('.drawing', button.closest('article'));
      for (const known of holders.map((holder) => drawings.get(holder)).filter(Boolean)) {
        if (button.dataset.zoom === 'fit') fitView(known);
        else zoomBy(known, Number(button.dataset.zoom));
      }
    });
  }
}
