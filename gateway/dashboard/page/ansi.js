// Terminal output as text: colours of SGR become classes, every other escape and control sign is shown as a sign.

const SGR = /\x1b\[([0-9;]*)m/g;
const NAMES = ["black", "red", "green", "yellow", "blue", "magenta", "cyan", "white"];

export function shown(text) {
  return text.replace(/[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]/g, (sign) => {
    const code = sign.charCodeAt(0);
    return code < 32 ? String.fromCharCode(0x2400 + code) : code === 127 ? "\u2421" : "\ufffd";
  });
}

export function applySgr(style, codes) {
  let next = {...style};
  const list = codes === "" ? [0] : codes.split(";").map(Number);
  for (let at = 0; at < list.length; at += 1) {
    const code = list[at];
    if (code === 0) next = {};
    else if (code === 1) next.bold = true;
    else if (code === 2) next.dim = true;
    else if (code === 3) next.italic = true;
    else if (code === 4) next.under = true;
    else if (code === 22) { next.bold = false; next.dim = false; }
    else if (code === 23) next.italic = false;
    else if (code === 24) next.under = false;
    else if (code >= 30 && code <= 37) next.fg = NAMES[code - 30];
    else if (code >= 90 && code <= 97) next.fg = NAMES[code - 90];
    else if (code === 39) next.fg = undefined;
    else if (code === 38 || code === 48) at += list[at + 1] === 5 ? 2 : list[at + 1] === 2 ? 4 : 0;
  }
  return next;
}

// Returns [[text, classes]], and the style that the next line begins with.
export function pieces(line, style) {
  const found = [];
  let from = 0, now = style || {};
  const push = (text) => { if (text) found.push([shown(text), classes(now)]); };
  for (const match of line.matchAll(SGR)) {
    push(line.slice(from, match.index));
    now = applySgr(now, match[1]);
    from = match.index + match[0].length;
  }
  push(line.slice(from));
  return [found, now];
}

function classes(style) {
  return ["bold", "dim", "italic", "under"].filter((name) => style[name]).map((name) => `a-${name}`)
    .concat(style.fg ? [`a-${style.fg}`] : []).join(" ");
}
