// Paper is white and does not scroll: drawings become pictures in light colours that fit its width.

let themeOnScreen = null;

function beforePrint() {
  themeOnScreen = document.documentElement.getAttribute('data-theme');
  document.documentElement.setAttribute('data-theme', 'light');
  for (const details of all('details:not(.text)')) details.open = true;
  for (const [holder, {cy}] of drawings) {
    cy.style(styles());
    const source = cy.png({full: true, scale: 1.6, bg: colour('surface')});
    holder.append(element('img', {class: 'printed', src: source, alt: holder.querySelector('.canvas').getAttribute('aria-label')}));
  }
}

function afterPrint() {
  if (themeOnScreen === null) document.documentElement.removeAttribute('data-theme');
  else document.documentElement.setAttribute('data-theme', themeOnScreen);
  for (const image of all('.printed')) image.remove();
  for (const {cy} of drawings.values()) cy.style(styles());
}

function startPrint() {
  addEventListener('beforeprint', beforePrint);
  addEventListener('afterprint', afterPrint);
}
