// Starts everything, in the order in which the parts need each other.

startTheme();
startTransforms();
startSearch();
startKeys();
startPrint();
startZoomButtons();
startCode();
themeListeners.push(() => [...drawings.keys()].forEach((holder) => redraw(holder)));

// The tables are there to be read before anything is drawn.
requestAnimationFrame(() => setTimeout(() => {
  startLayers();
  followHash();
  document.documentElement.dataset.ready = String(Math.round(performance.now()));
}));

let width = innerWidth;
addEventListener('resize', () => {
  if (innerWidth === width) return; // a phone hides its bars while it scrolls
  width = innerWidth;
  [...drawings.keys()].forEach((holder) => redraw(holder));
});
