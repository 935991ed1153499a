// Light, dark, or as the system says. Canvas drawings cannot read CSS variables, so their colours are asked for here.

const themes = ['auto', 'light', 'dark'];
const themeListeners = [];

function applyTheme(name) {
  const root = document.documentElement;
  if (name === 'auto') root.removeAttribute('data-theme');
  else root.setAttribute('data-theme', name);
  const button = byId('theme');
  button.textContent = {auto: '◐', light: '☀', dark: '☾'}[name];
  button.title = `Theme: ${name} (t)`;
  button.setAttribute('aria-label', `Theme: ${name}. Change it`);
  for (const listener of themeListeners) listener();
}

function remembered() {
  try {
    return localStorage.getItem('graft-report-theme') ?? 'auto';
  } catch {
    return 'auto'; // a file that is opened without storage
  }
}

function nextTheme() {
  const name = themes[(themes.indexOf(remembered()) + 1) % themes.length];
  try {
    localStorage.setItem('graft-report-theme', name);
  } catch {
    document.documentElement.dataset.unsaved = 'theme';
  }
  applyTheme(name);
}

// The colour that a CSS variable has now, as rgb(…).
function colour(name) {
  const probe = byId('probe');
  probe.style.color = `var(--${name})`;
  return getComputedStyle(probe).color;
}

function startTheme() {
  byId('theme').addEventListener('click', nextTheme);
  matchMedia('(prefers-color-scheme: dark)').addEventListener('change', () => applyTheme(remembered()));
  applyTheme(themes.includes(remembered()) ? remembered() : 'auto');
}
