// Charts of the totals. Each has its numbers in a table, which is filled when it is first opened.

const PLOT = { width: 360, height: 190, left: 38, right: 8, top: 8, bottom: 30 };

function plot(width = PLOT.width, height = PLOT.height) {
  const inside = { x0: PLOT.left, x1: width - PLOT.right, y0: height - PLOT.bottom, y1: PLOT.top };
  const svg = drawing("svg", { viewBox: `0 0 ${width} ${height}`, role: "img" });
  svg.append(drawing("line", { class: "axis", x1: inside.x0, x2: inside.x1, y1: inside.y0, y2: inside.y0 }));
  return { svg, ...inside };
}

function mark(area, text, x, y, anchor = "middle") {
  area.svg.append(drawing("text", { class: "axis", x, y, "text-anchor": anchor }, text));
}

function heights(area, most, shown = String) {
  for (const part of [0, 0.5, 1]) {
    const y = area.y0 + (area.y1 - area.y0) * part;
    area.svg.append(drawing("line", { class: "axis", x1: area.x0, x2: area.x1, y1: y, y2: y }));
    mark(area, shown(most * part), area.x0 - 4, y + 4, "end");
  }
}

function bars(entries, most, xName, shown) {
  const area = plot();
  heights(area, most, shown);
  const step = (area.x1 - area.x0) / Math.max(entries.length, 1);
  const every = Math.ceil(entries.length / 16);
  entries.forEach(([name, value], i) => {
    const height = most ? ((area.y0 - area.y1) * value) / most : 0;
    const x = area.x0 + step * (i + 0.15);
    area.svg.append(drawing("rect", { class: "bar", x, y: area.y0 - height, width: step * 0.7, height }));
    if (i % every === 0) mark(area, name, area.x0 + step * (i + 0.5), area.y0 + 12);
  });
  mark(area, xName, (area.x0 + area.x1) / 2, area.y0 + 26);
  return area.svg;
}

function calibration(bins) {
  const area = plot(PLOT.width, 240);
  heights(area, 1);
  const x = (share) => area.x0 + (area.x1 - area.x0) * share;
  const y = (share) => area.y0 + (area.y1 - area.y0) * share;
  area.svg.append(drawing("line", { class: "axis", x1: x(0), y1: y(0), x2: x(1), y2: y(1) }));
  for (const bin of bins) {
    const r = 2.5 + Math.log10(bin.nodes) * 1.7;
    area.svg.append(drawing("circle", { class: "dot", cx: x(bin.predicted), cy: y(bin.rate), r }));
  }
  for (const share of [0, 0.5, 1]) mark(area, String(share), x(share), area.y0 + 12);
  mark(area, "predicted", x(0.5), area.y0 + 26);
  return area.svg;
}

const CURVES = [
  ["budget", (round) => round.budget], ["drafted", (round) => Math.max(round.nodes.length - 1, 0)],
  ["expected", (round) => round.expected], ["accepted", (round) => round.accepted],
];

// Budget and what became of it over the rounds; a click goes to the round there.
function overTime(select, width) {
  const area = plot(width, 200);
  const most = Math.max(1, ...rounds.map((round) => Math.max(...CURVES.map(([, of]) => of(round) ?? 0))));
  heights(area, most);
  const last = Math.max(rounds.length - 1, 1);
  const x = (index) => area.x0 + ((area.x1 - area.x0) * index) / last;
  const y = (value) => area.y0 + ((area.y1 - area.y0) * value) / most;
  for (const [name, of] of CURVES) {
    const points = rounds.map((round, i) => (of(round) === null ? null : `${x(i).toFixed(1)},${y(of(round)).toFixed(1)}`));
    area.svg.append(drawing("polyline", { class: `curve ${name}`, points: points.filter(Boolean).join(" ") }));
  }
  for (const part of [0, 0.25, 0.5, 0.75, 1]) {
    const index = Math.round(part * (rounds.length - 1));
    const anchor = part === 1 ? "end" : "middle"; // the last one would run out of the drawing
    if (rounds.length > 4 || part === 0) mark(area, String(Math.max(index, 0)), x(Math.max(index, 0)), area.y0 + 12, anchor);
  }
  mark(area, "round", (area.x0 + area.x1) / 2, area.y0 + 26);
  const cursor = drawing("line", { class: "cursor", y1: area.y0, y2: area.y1 });
  area.svg.append(cursor);
  area.svg.addEventListener("click", (event) => {
    const box = area.svg.getBoundingClientRect();
    const at = ((event.clientX - box.left) / box.width) * width;
    select(Math.round(((at - area.x0) / (area.x1 - area.x0)) * last));
  });
  const move = (index) => {
    cursor.setAttribute("x1", x(index));
    cursor.setAttribute("x2", x(index));
  };
  return { svg: area.svg, move };
}

function table(names, rows) {
  const body = element("tbody");
  const details = element("details", {}, element("summary", {}, "Numbers"),
    element("div", { class: "scroll" },
      element("table", {}, element("thead", {}, element("tr", {}, ...names.map((name) => element("th", {}, name)))), body)));
  details.addEventListener("toggle", () => {
    if (body.children.length) return;
    body.append(...rows().map((cells) => element("tr", {}, ...cells.map((cell) => element("td", {}, cell)))));
  });
  return details;
}

function figure(title, about, ...parts) {
  return element("figure", {}, element("h3", {}, title), element("figcaption", {}, about), ...parts);
}

function rates(name, key) {
  const found = trace.end.totals[key];
  return [
    bars(found.map((each) => [String(each.value), each.rate]), 1, name),
    table([name, "tried", "accepted", "rate"], () => found.map((_, i) =>
      ["value", "tried", "accepted", "rate"].map((column) => number(`end.totals.${key}.${i}.${column}`, 3)))),
  ];
}

function drawTotals(place, select) {
  const { accepted_lengths: lengths, calibration: bins } = trace.end.totals;
  const stages = trace.end.figures.stage_seconds;
  const counts = Object.entries(lengths);
  const time = overTime(select, Math.min(Math.max(place.clientWidth - 40, PLOT.width), 1600));
  const curves = element("ul", { class: "legend" }, ...CURVES.map(([name]) =>
    element("li", {}, element("i", { class: `key ${name}` }), name)));
  const budget = figure("Budget over time", "nodes a round: allowed, drafted, expected to be accepted, accepted; a click goes to the round",
    curves, time.svg,
    table(["round", "context", "budget", "expected", "accepted", "seconds"], () => rounds.map((_, i) =>
      ["index", "length", "budget", "expected", "accepted", "seconds"].map((column) => number(`rounds.${i}.${column}`, 4)))));
  budget.classList.add("wide");
  place.replaceChildren(
    budget,
    figure("Accepted length", "rounds by accepted drafts + 1",
      bars(counts, Math.max(0, ...Object.values(lengths)), "accepted length"),
      table(["length", "rounds"], () => counts.map(([length]) => [length, number(`end.totals.accepted_lengths.${length}`)]))),
    figure("Acceptance by depth", "of the rounds that came to a node with children at the depth before, those that went on",
      ...rates("depth", "by_depth")),
    figure("Acceptance by rank", "of the steps at a node with a child of that rank, those that took it",
      ...rates("rank", "by_rank")),
    figure("Calibration", "share of nodes accepted over the probability that the drafter gave their paths; larger dots are more nodes",
      calibration(bins),
      table(["from", "to", "nodes", "predicted", "accepted", "rate"], () => bins.map((_, i) =>
        ["low", "high", "nodes", "predicted", "accepted", "rate"].map((column) => number(`end.totals.calibration.${i}.${column}`, 3))))),
    figure("Time by stage", "seconds over all rounds",
      bars(Object.entries(stages), Math.max(0, ...Object.values(stages)), "stage", (value) => value.toPrecision(2)),
      table(["stage", "seconds"], () => Object.keys(stages).map((name) => [name, number(`end.figures.stage_seconds.${name}`, 4)]))),
  );
  return time.move;
}
