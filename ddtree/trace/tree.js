// The tree of one round: what was accepted and the target’s choice run along the top, all else stands below in the
// order of its rank.

const BOX = { width: 96, height: 22, column: 140, row: 28, letters: 12 };

function childrenOf(parents) {
  const children = parents.map(() => []);
  parents.forEach((parent, node) => { if (parent >= 0) children[parent].push(node); });
  return children;
}

// Everything about a node that is not recorded as such. The target's choice is the node after the last.
function treeOf(round) {
  const children = childrenOf(round.parents);
  const choice = round.nodes.length;
  const leaf = round.path[round.path.length - 1];
  const accepted = new Set(round.path);
  const depth = [], place = [], order = [], origin = [];
  let row = 0;
  children.push([]);
  // Without recursion: a tree can be deeper than a browser's stack.
  const waiting = [[0, 0, true]];
  while (waiting.length) {
    const [node, level, first] = waiting.pop();
    const parent = node === choice ? leaf : round.parents[node];
    if (!first) row += 1;
    depth[node] = level;
    place[node] = row;
    order.push(node);
    if (node === choice) origin[node] = "bonus";
    else if (node === 0) origin[node] = "root";
    else if (accepted.has(node)) {
      const straight = children[parent][0] === node && (parent === 0 || origin[parent] === "spine");
      origin[node] = straight ? "spine" : "branch";
    } else origin[node] = accepted.has(parent) ? "sibling" : "off";
    const ahead = node === leaf ? choice : round.path[round.path.indexOf(node) + 1];
    const taken = accepted.has(node) ? [ahead] : [];
    const below = [...taken, ...children[node].filter((child) => child !== ahead)];
    for (let i = below.length - 1; i >= 0; i -= 1) waiting.push([below[i], level + 1, i === 0]);
  }
  return { children, choice, leaf, depth, place, order, origin, rows: row + 1 };
}

function probability(round, node) {
  if (!round.log_probs || node === 0) return null;
  return Math.exp(round.log_probs[node] - round.log_probs[round.parents[node]]);
}

function drawTree(round, told) {
  if (!round.nodes.length) return element("p", {}, "The prompt’s own round: one token, nothing drafted.");
  const tree = treeOf(round);
  const x = (node) => 8 + tree.depth[node] * BOX.column;
  const y = (node) => 8 + tree.place[node] * BOX.row;
  const width = Math.max(...tree.depth) * BOX.column + BOX.width + 16;
  const svg = drawing("svg", { width, height: tree.rows * BOX.row + 8, role: "group" });
  const edges = drawing("g"), boxes = drawing("g");
  for (const node of tree.order) {
    const parent = node === tree.choice ? tree.leaf : round.parents[node];
    const share = node === tree.choice ? null : probability(round, node);
    if (node !== 0) {
      const [ax, ay, bx, by] = [x(parent) + BOX.width, y(parent) + BOX.height / 2, x(node), y(node) + BOX.height / 2];
      const bend = ax + 14;
      edges.append(drawing("path", {
        class: `edge ${tree.origin[node]}`,
        d: `M${ax} ${ay} C${bend} ${ay} ${ax} ${by} ${bend} ${by} L${bx} ${by}`,
        "stroke-width": share === null ? 1.5 : 1 + 3 * share,
      }));
    }
    if (share !== null) {
      boxes.append(drawing("text", {
        class: "probability", x: x(node) - 4, y: y(node) + 8, "text-anchor": "end", "data-node": node,
      }, share.toFixed(2)));
    }
    boxes.append(drawNode(round, tree, node, x(node), y(node), told));
  }
  svg.append(edges, boxes);
  return svg;
}

function drawNode(round, tree, node, x, y, told) {
  const token = node === tree.choice ? round.draws[tree.leaf] : round.nodes[node];
  const text = [...label(token)];
  const shown = text.length > BOX.letters ? [...text.slice(0, BOX.letters - 1), "…"].join("") : text.join("");
  const emitted = node === tree.choice ? round.path.length : round.path.indexOf(node);
  const cut = emitted > round.tokens.length ? " cut" : "";
  const made = drawing("g", {
    class: `node ${tree.origin[node]}${cut}`, tabindex: "-1", "data-node": node, "data-token": token,
    transform: `translate(${x} ${y})`,
  },
  drawing("rect", { width: BOX.width, height: BOX.height }),
  drawing("text", { x: BOX.width / 2, y: 15, "text-anchor": "middle" }, shown));
  const tell = () => {
    for (const other of made.parentNode.querySelectorAll(".pointed")) other.classList.remove("pointed");
    made.classList.add("pointed");
    told(describe(round, tree, node, cut));
  };
  made.addEventListener("pointerenter", tell);
  made.addEventListener("focus", tell);
  made.addEventListener("click", () => made.focus({ preventScroll: true }));
  made.setAttribute("aria-label", describe(round, tree, node, cut));
  return made;
}

function describe(round, tree, node, cut) {
  const named = (token) => `“${label(token)}” (id ${token})`;
  const behind = cut ? ", behind the end of the text" : "";
  if (node === tree.choice) return `${named(round.draws[tree.leaf])}: the target’s choice at the leaf${behind}.`;
  const fate = {
    root: "the root, the last token written before", spine: "accepted, on the spine", branch: "accepted, on a branch",
    sibling: "rejected", off: "below a rejected node",
  }[tree.origin[node]];
  const parts = [`${named(round.nodes[node])}: ${fate}${behind}`];
  if (node !== 0) {
    parts.push(`depth ${tree.depth[node]}`, `rank ${tree.children[round.parents[node]].indexOf(node)}`);
    if (round.log_probs) {
      parts.push(`${probability(round, node).toPrecision(3)} after its parent`);
      parts.push(`${Math.exp(round.log_probs[node]).toPrecision(3)} from the root`);
    }
  }
  return `${parts.join(", ")}. The target’s choice here: ${named(round.draws[node])}.`;
}
