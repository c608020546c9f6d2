// The trace, and elements that show its numbers. Every number that is shown as it is recorded stands in a <data>
// element: `value` is exactly the recorded one, `data-from` says where it lies.

const trace = { rounds: [] };
for (const line of document.getElementById("lines").textContent.trim().split("\n")) {
  const { kind, ...fields } = JSON.parse(line);
  if (kind === "round") trace.rounds.push(fields);
  else trace[kind] = fields;
}
const rounds = trace.rounds;
const pieces = trace.pieces.pieces;

function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

function drawing(name, attributes = {}, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

function recorded(from) {
  return from.split(".").reduce((value, key) => value?.[key], trace);
}

// `digits` counts those behind the point of a number that is no whole one.
function number(from, digits = 2, unit = "") {
  const value = recorded(from);
  if (value === null || value === undefined) return "–";
  const text = Number.isInteger(value) ? String(value) : value.toFixed(digits);
  const shown = element("data", { value: String(value), "data-from": from, "data-digits": digits }, text);
  return unit ? element("span", {}, shown, unit) : shown;
}

function figures(list, entries) {
  list.replaceChildren(...entries.map(([name, ...values]) =>
    element("div", {}, element("dt", {}, name), element("dd", {}, ...values))));
}

// Control characters as their pictures, so that nothing is invisible or moves what is written around it.
function printable(text, breaks = "\n\t") {
  return text.replace(/[\u0000-\u001f\u007f\u200e\u200f\u202a-\u202e\u2066-\u2069]/g, (mark) => {
    if (breaks.includes(mark)) return mark;
    const code = mark.charCodeAt(0);
    return code < 32 ? String.fromCharCode(0x2400 + code) : code === 127 ? "\u2421" : "\ufffd";
  });
}

function label(token) {
  const text = printable(pieces[token] ?? "", "");
  return text === "" ? `id ${token}` : text.replaceAll(" ", "␣").replaceAll("\u240a", "↵");
}
