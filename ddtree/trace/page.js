// The page: the text, the round that is looked at, and the keys. Only that round's tree is ever drawn.

const byId = (id) => document.getElementById(id);
let current = -1;

function drawSummary() {
  const { figures: all } = trace.end;
  figures(byId("summary"), [
    ["tokens", number("end.totals.tokens")],
    ["rounds", number("end.totals.rounds")],
    ["target forwards", number("end.totals.target_forwards")],
    ["tokens per forward", number("end.totals.tokens_per_forward")],
    ["mean accepted length", number("end.figures.mean_accepted_length")],
    ["expected by the drafter", number("end.totals.expected_length")],
    ["tokens/s", number("end.figures.tokens_per_second", 1)],
    ["first token after", number("end.figures.first_token_seconds", 3, all.first_token_seconds === null ? "" : " s")],
    ["generating", number("end.figures.seconds", 3, " s")],
  ]);
  const meanings = {
    plain: "nothing was drafted", spine: "accepted, the drafter’s likeliest chain", branch: "accepted, beside that chain",
    bonus: "the target’s own draw",
  };
  byId("origins").append(...Object.keys(trace.end.totals.origins).map((origin) => element("li", { title: meanings[origin] },
    element("span", { class: `token ${origin}` }, origin), number(`end.totals.origins.${origin}`))));
  byId("prompt").textContent = printable(trace.run.prompt);
}

function drawText() {
  const parts = document.createDocumentFragment();
  for (const round of rounds) {
    round.texts.forEach((text, i) => parts.append(element("span", {
      class: `token ${round.origins[i]}`, "data-round": round.index, title: `round ${round.index}: ${round.origins[i]}, id ${round.tokens[i]}`,
    }, printable(text))));
  }
  byId("text").replaceChildren(parts, printable(trace.end.rest));
  byId("text").addEventListener("click", (event) => {
    const token = event.target.closest("[data-round]");
    if (token) select(Number(token.dataset.round));
  });
}

function drawRound(round) {
  const at = `rounds.${round.index}`;
  figures(byId("facts"), [
    ["context", number(`${at}.length`)],
    ["budget", number(`${at}.budget`)],
    ["drafted", String(Math.max(round.nodes.length - 1, 0))],
    ["expected", number(`${at}.expected`)],
    ["accepted", number(`${at}.accepted`)],
    ["emitted", String(round.tokens.length)],
    ["seconds", number(`${at}.seconds`, 4)],
    ...Object.keys(round.stages).map((name) => [name, number(`${at}.stages.${name}`, 4)]),
  ]);
  byId("tree").replaceChildren(drawTree(round, (text) => { byId("node").textContent = text; }));
  byId("tree").scrollTo(0, 0);
  byId("node").textContent = "Point at a node, or step through them with the keys.";
}

function select(index) {
  index = Math.min(Math.max(index, 0), rounds.length - 1);
  if (index === current || !rounds.length) return;
  for (const old of document.querySelectorAll(".token.current")) old.classList.remove("current");
  current = index;
  byId("slider").value = index;
  byId("number").textContent = `${index} of ${rounds.length - 1}`;
  drawRound(rounds[index]);
  const own = document.querySelectorAll(`#text [data-round="${index}"]`);
  for (const token of own) token.classList.add("current");
  if (own.length) reveal(byId("text"), own[0]);
  moveCursor(index);
}

// Scrolls the box and not the page.
function reveal(box, part) {
  const [outer, inner] = [box.getBoundingClientRect(), part.getBoundingClientRect()];
  if (inner.top < outer.top || inner.bottom > outer.bottom) box.scrollTop += inner.top - outer.top - outer.height / 3;
}

function stepNode(by) {
  const nodes = [...document.querySelectorAll("#tree .node")];
  if (!nodes.length) return;
  const at = nodes.findIndex((node) => node.classList.contains("pointed"));
  nodes[Math.min(Math.max(at + by, 0), nodes.length - 1)].focus();
}

function nextTheme() {
  const themes = ["auto", "light", "dark"];
  setTheme(themes[(themes.indexOf(document.documentElement.dataset.theme ?? "auto") + 1) % themes.length]);
}

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  byId("theme").textContent = `theme: ${theme}`;
  try { localStorage.setItem("ddtree-theme", theme); } catch { /* a page from a file may have no storage */ }
}

function storedTheme() {
  try { return localStorage.getItem("ddtree-theme") ?? "auto"; } catch { return "auto"; }
}

const KEYS = {
  ArrowRight: () => select(current + 1), ArrowLeft: () => select(current - 1),
  Home: () => select(0), End: () => select(rounds.length - 1),
  ArrowDown: () => stepNode(1), ArrowUp: () => stepNode(-1), t: nextTheme,
};

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || !KEYS[event.key]) return;
  event.preventDefault();
  KEYS[event.key]();
});
byId("slider").max = Math.max(rounds.length - 1, 0);
byId("slider").addEventListener("input", () => select(Number(byId("slider").value)));
byId("previous").addEventListener("click", () => select(current - 1));
byId("next").addEventListener("click", () => select(current + 1));
byId("theme").addEventListener("click", nextTheme);

setTheme(storedTheme());
drawSummary();
drawText();
const moveCursor = drawTotals(byId("totals"), select);
select(Math.min(1, rounds.length - 1));
