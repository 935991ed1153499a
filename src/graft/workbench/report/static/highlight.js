// Words of Python and C++ in colour. Text stays text: only spans are made.

const WORDS = new Set(('False None True and as assert async await break class continue def del elif else except finally for from global if import in is'
  + ' lambda nonlocal not or pass raise return try while with yield'
  + ' auto bool char const constexpr double extern float inline int int64_t namespace nullptr static struct template using void').split(' '));
const TOKENS = /(#(?!include).*|\/\/.*|\/\*.*?\*\/)|("(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')|([A-Za-z_]\w*)|(\b\d[\w.]*)/g;

function coloured(line) {
  const found = [];
  let at = 0;
  for (const match of line.matchAll(TOKENS)) {
    const [text, comment, string, word, number] = match;
    const kind = comment ? 'comment' : string ? 'string' : number ? 'number' : WORDS.has(word) ? 'word' : '';
    if (!kind) continue;
    found.push(line.slice(at, match.index), element('i', {class: kind}, text));
    at = match.index + text.length;
  }
  found.push(line.slice(at));
  return found;
}
