// A small map in the corner of a drawing that does not fit its window: all nodes, and the part that is seen.

const MAP_WIDTH = 150, MAP_HEIGHT = 190;

function startMinimap(known) {
  const {cy, holder, size} = known;
  const scale = Math.min(MAP_WIDTH / size.width, MAP_HEIGHT / size.height);
  const map = element('canvas', {class: 'minimap', 'aria-hidden': 'true'});
  const width = Math.max(24, Math.round(size.width * scale)), height = Math.max(24, Math.round(size.height * scale));
  map.width = 2 * width;
  map.height = 2 * height;
  map.style.width = `${width}px`;
  map.style.height = `${height}px`;
  holder.append(map);
  known.map = map;
  const centre = (event) => {
    const box = map.getBoundingClientRect();
    centreOn(known, {x: (event.clientX - box.x) / scale, y: (event.clientY - box.y) / scale});
  };
  map.addEventListener('pointerdown', (event) => {
    map.setPointerCapture(event.pointerId);
    centre(event);
  });
  map.addEventListener('pointermove', (event) => event.buttons && centre(event));
  let asked = false;
  cy.on('viewport', () => {
    if (asked) return;
    asked = true;
    requestAnimationFrame(() => {
      asked = false;
      if (drawings.get(holder) === known) drawMinimap(known, scale);
    });
  });
  drawMinimap(known, scale);
}

function drawMinimap({cy, holder, scene, size, map}, scale) {
  const zoom = cy.zoom(), pan = cy.pan();
  const seen = {x: -pan.x / zoom, y: -pan.y / zoom, w: holder.clientWidth / zoom, h: holder.clientHeight / zoom};
  const whole = seen.x <= 8 && seen.y <= 8 && seen.x + seen.w >= size.width - 8 && seen.y + seen.h >= size.height - 8;
  map.hidden = whole;
  if (whole) return;
  const pen = map.getContext('2d');
  pen.setTransform(2 * scale, 0, 0, 2 * scale, 0, 0);
  pen.clearRect(0, 0, size.width, size.height);
  for (const node of scene.nodes) {
    const changed = changeClass(node.change);
    pen.fillStyle = colour(changed || `b-${['pill', 'edge'].includes(node.family) ? 'edge' : node.family}`);
    pen.fillRect(node.x - node.width / 2, node.y - node.height / 2, node.width, node.height);
  }
  pen.strokeStyle = colour('accent');
  pen.lineWidth = 2 / scale;
  pen.strokeRect(Math.max(0, seen.x), Math.max(0, seen.y), Math.min(seen.w, size.width), Math.min(seen.h, size.height));
}
