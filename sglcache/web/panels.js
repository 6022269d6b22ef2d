// Tables and lists. Whatever came from outside (names of models, tenants, runners, namespaces; text) becomes a text node.

import { count, ROW, seconds, spaceName, tierOf } from "/web/tree.js";
import { short } from "/web/charts.js";

export function make(tag, attributes = {}, ...inside) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "onclick") made.addEventListener("click", value);
    else if (value !== null && value !== undefined && value !== false) made.setAttribute(name, value === true ? "" : value);
  }
  for (const each of inside) if (each !== null && each !== undefined) made.append(each);
  return made;
}

// Replace what is in `box`, and leave it alone if it would be the same: so a selection of text, and a focus, stay.
export function put(box, ...inside) {
  const next = make("div", {}, ...inside);
  if (next.isEqualNode(make("div", {}, ...[...box.childNodes].map((node) => node.cloneNode(true))))) return;
  const focused = box.contains(document.activeElement) ? document.activeElement.dataset.key : null;
  box.replaceChildren(...next.childNodes);
  if (focused) box.querySelector(`[data-key="${CSS.escape(focused)}"]`)?.focus();
}

export function table(heads, rows, caption) {
  const head = make("tr", {}, ...heads.map(([text, right]) => make("th", { scope: "col", class: right ? "n" : null }, text)));
  return make("table", {}, make("caption", { class: "out" }, caption), make("thead", {}, head), make("tbody", {}, ...rows));
}

const cell = (text, kind = null) => make("td", { class: kind }, text);
const num = (value) => cell(value === null || value === undefined ? "–" : typeof value === "number" ? count(value) : value, "n");
const pair = (name, value) => (value === null || value === undefined ? null : make("div", {}, make("dt", {}, name), make("dd", {}, value)));

export function facts(box, pairs) {
  put(box, ...pairs.map(([name, value]) => pair(name, value)));
}

const dot = (tier) => make("i", { class: "swatch", "data-tier": tier, "aria-hidden": "true" });
const IN_WORDS = { device: "device", host: "host", both: "both", bare: "–" };

// The tree in words: the largest branches that are drawn.
export function largest(box, tree, pageSize, select) {
  const spaces = tree.items.filter((item) => item.space).length > 1;
  const rows = tree.largest(40).map((item) => {
    const { row } = item, tier = tierOf(row[ROW.present]), locks = row[ROW.deviceLocks] + row[ROW.hostLocks];
    const pick = () => select(item.name);
    let space = item;
    while (space.parent) space = space.parent;
    const label = `${count(item.depth * pageSize)}–${count(item.end * pageSize)}`;
    return make("tr", { class: "pick", "aria-selected": tree.selected === item.name ? "true" : "false", onclick: pick },
      make("td", { class: "n" }, make("button", { type: "button", "data-key": `n${item.name}` }, label)),
      num(row[ROW.total]), make("td", { class: "one" }, dot(tier), IN_WORDS[tier]), num(locks || ""), num(seconds(row[ROW.idle])),
      spaces ? cell(spaceName(space.space), "name") : null);
  });
  put(box, rows.length
    ? table([["tokens", true], ["branch", true], ["where"], ["locks", true], ["idle", true], ...(spaces ? [["namespace"]] : [])], rows, "Largest prefixes: their tokens, the pages of their branches")
    : make("p", { class: "note muted" }, "Nothing is cached."));
}

export function detail(box, node, item, pageSize, { more, enter, select }) {
  if (node.gone !== undefined) {
    put(box, make("p", { class: "note muted" }, "This node is gone: it was evicted, or joined with another."));
    return;
  }
  const space = spaceName([node.lora, node.extra_key_hash, node.cache_salt_hash]);
  const entry = (name, ...value) => [make("dt", {}, name), make("dd", {}, ...value)];
  const cells = node.cells.map((each) => `${each.resource === "full" ? "" : `${each.resource} `}${each.tier.toLowerCase()}${each.writing ? " (being written)" : ""}${each.locks ? `, ${each.locks} lock${each.locks > 1 ? "s" : ""}` : ""}`);
  const parts = [
    make("dl", { class: "grid" },
      ...entry("where", cells.length ? cells.join("; ") : node.pages ? "nowhere" : "root of a namespace"),
      ...entry("tokens", `${count(node.before)} – ${count(node.before + node.num_tokens)} (${count(node.pages)} pages)`),
      ...entry("namespace", space + (node.told ? "" : "; routers are not told of it")),
      ...(item ? entry("branch", `${count(item.row[ROW.total])} pages: device ${count(item.row[ROW.device])}, host ${count(item.row[ROW.host])}`) : []),
      ...entry("children", node.children >= 2048 ? "2,048 and more" : count(node.children)),
      ...(node.age_s === null ? [] : entry("came", `${seconds(node.age_s)} ago`)),
      ...(item && node.pages ? entry("last used", `${seconds(item.row[ROW.idle])} ago`) : []),
      ...entry("held by", ...holders(node)),
      ...entry("path", make("span", {}, ...node.path.flatMap((each, i) => [
        i ? " › " : "",
        make("button", { type: "button", "data-key": `p${each.name}`, onclick: () => select(each.name) }, i || each.pages ? `${count(each.pages * pageSize)}` : "root"),
      ]), ` › this${node.depth > node.path.length ? ` (${node.depth} deep)` : ""}`))),
    make("div", { class: "more" }, make("button", { type: "button", "data-key": "enter", onclick: () => enter(node.name) }, "Show this branch alone ", make("kbd", {}, "Enter"))),
  ];
  if (node.text !== undefined) parts.push(make("h3", {}, "Text"), make("pre", { class: "text", tabindex: "0", id: "node-text" }, node.text));
  else if (node.no_text) parts.push(make("h3", {}, "Text"), make("p", { class: "note muted" }, node.no_text));
  if (node.pages) {
    const shown = node.tokens === null ? 0 : node.tokens.length, at = node.start * pageSize;
    const rest = node.num_tokens - at - shown;
    parts.push(make("h3", {}, node.tokens === null ? "Tokens" : `Tokens ${count(node.before + at)} – ${count(node.before + at + shown)}`));
    parts.push(node.tokens === null
      ? make("p", { class: "note muted" }, "Not shown: http.show_tokens says where they are (by default on a loopback address alone).")
      : make("pre", { class: "tokens", tabindex: "0", id: "node-tokens" }, node.tokens.join(" ")));
    if (node.start > 0 || (rest > 0 && shown)) {
      parts.push(make("div", { class: "more" },
        node.start > 0 ? make("button", { type: "button", "data-key": "before", onclick: () => more(Math.max(0, node.start - Math.ceil(2048 / pageSize))) }, "before") : null,
        rest > 0 && shown ? make("button", { type: "button", "data-key": "after", onclick: () => more(node.start + Math.floor(shown / pageSize)) }, `next (${count(rest)} more)`) : null));
    }
    parts.push(make("h3", {}, "Page hashes, as events have them"));
    parts.push(node.hashes.length
      ? make("div", { class: "scroll hashes", tabindex: "0" }, table([["page", true], ["int64", true], ["digest"]], node.hashes.map((each, i) => make("tr", {}, num(node.before / pageSize + node.start + i), cell(each.int64, "n"), cell(each.hex))), "Page hashes"))
      : make("p", { class: "note muted" }, node.told ? "Not hashed: events are off, or they are still to be cut." : "Not hashed: routers are not told of this namespace."));
  }
  put(box, ...parts);
}

function holders(node) {
  const said = [
    ...node.leases.map((each) => `lease ${each.lease} of session ${each.session} (${each.tiers.join(" + ").toLowerCase()})`),
    ...node.pins.map((each) => `pin “${each.owner}” of session ${each.session}`),
    ...node.copies.map((each) => `copy ${each.ticket} to the ${each.to.toLowerCase()}`),
  ];
  const most = 8, shown = said.slice(0, most);
  if (said.length > most) shown.push(`and ${said.length - most}${node.all_holders ? "" : "+"} more`);
  else if (!node.all_holders) shown.push("and others: there are too many leases to look at all");
  return shown.length ? shown.flatMap((text, i) => [i ? make("br") : "", text]) : ["nobody"];
}

export function sessions(box, rows) {
  const sorted = [...rows].sort((one, other) => (other.leases || 0) - (one.leases || 0)).slice(0, 60);
  put(box, sorted.length
    ? table([["session"], ["who"], ["age", true], ["idle", true], ["leases", true], ["pages its own", true], ["cached, in use", true], ["pins", true], ["waits", true]],
        sorted.map((each) => {
          const who = (each.members || []).map((member) => `${member.name || member.role} (${member.role}, pid ${member.pid}${member.alive ? "" : ", dead"})`).join(", ");
          const sum = (key) => (each.pages ? each.pages.reduce((total, page) => total + (page[key] || 0), 0) : null);
          const own = sum("leased"), fenced = sum("fenced");
          return make("tr", { "data-bad": each.ended ? true : null },
            cell(`${each.session}${each.ended ? " ended" : ""}`),
            cell(who || each.why || "–", "name"), num(seconds(each.age_s)), num(seconds(each.idle_s)), num(each.leases),
            num(fenced ? `${count(fenced)} fenced` : own), num(sum("locked")), num(each.pinned_pages ?? each.pins), num(each.waiting));
        }), "Sessions")
    : make("p", { class: "note muted" }, "No runner is attached."));
}

export function tenants(box, rows) {
  put(box, rows.length
    ? table([["tenant"], ["tier"], ["of its ceiling"], ["charged", true], ["floor", true], ["ceiling", true], ["locked", true], ["taken", true], ["below floor", true]],
        rows.slice(0, 200).map((each) => {
          const most = each.ceiling || Math.max(1, ...rows.filter((other) => other.tier === each.tier).map((other) => other.charged));
          const bar = make("div", { class: "bar2", "aria-hidden": "true" }, make("i"), make("i", { class: "locked" }));
          bar.children[0].style.width = `${(100 * (each.charged - each.locked)) / most}%`;
          bar.children[1].style.width = `${(100 * each.locked) / most}%`;
          return make("tr", {}, cell(each.tenant, "name"), cell(each.tier.toLowerCase()), make("td", {}, bar), num(each.charged), num(each.floor), num(each.ceiling), num(each.locked), num(each.taken), num(each.broken));
        }), "Tenants")
    : make("p", { class: "note muted" }, "No tenants are configured: all pages are everybody's."));
}

const LANES = { backup: "device → host", load: "host → device" };
const KINDS = { backup: "copy to the host", load: "copy from the host", store: "store below", fetch: "fetch from below", probe: "probe below", event: "a runner's event", room: "wait for room", answer: "an unanswered command", stream: "batches not sent", reader: "a reader of a replay", fenced: "fenced pages" };

export function copies(box, live, rates) {
  const lanes = live.copies.map((lane) => make("tr", {}, cell(LANES[lane.name] || lane.name, "one"), num(lane.in_flight), num(lane.in_flight ? seconds(lane.oldest_s) : "–"), num(rates[lane.name] === undefined ? "–" : `${short(rates[lane.name])}/s`), num(lane.failed)));
  const bad = new Set(live.troubles.map((each) => each.what));
  const old = Object.entries(live.oldest).filter(([kind, age]) => age > 0 && kind !== "backup" && kind !== "load");
  put(box,
    lanes.length ? table([["copies"], ["now", true], ["oldest", true], ["pages", true], ["failed", true]], lanes, "Copies in flight") : null,
    old.length ? table([["the oldest of"], ["age", true]], old.map(([kind, age]) => make("tr", { "data-bad": bad.has(kind) }, cell(KINDS[kind] || kind), num(seconds(age)))), "Oldest in flight")
      : make("p", { class: "note muted" }, "Nothing else waits."),
    make("p", { class: "note muted" }, `Longest stall of the loop in this life: ${(live.longest_stall_s * 1000).toFixed(0)} ms`));
}

export function explained(box, told) {
  if (told.error) { put(box, make("p", { class: "note" }, told.error)); return; }
  const parts = [];
  for (const line of [told.words, told.advice].flat(2)) if (typeof line === "string") parts.push(make("p", { class: "note" }, line));
  put(box, ...parts, parts.length ? null : tree(told));
}

const percent = (value) => (value === null || value === undefined ? "–" : `${(100 * value).toFixed(1)} %`);

export function reuse(box, told) {
  if (Array.isArray(told.more)) {
    put(box,
      make("p", { class: "note" }, told.verdict),
      make("dl", { class: "facts wrap" },
        pair("hit rate now", percent(told.hit_rate)), pair("of these on the device", percent(told.device_hit_rate)),
        pair("with memory without end", percent(told.ceiling)), pair("measured", percent(told.measured?.all)),
        pair("over", `${short(told.tokens)} tokens of ${short(told.requests)} requests in ${seconds(told.seconds)}`)),
      told.more.length && told.enough ? table([["more of"], ["GiB", true], ["hit rate", true], ["adds", true], ["tokens a second", true]], told.more.map((each) => make("tr", {}, cell(each.tier), num(`+${each.extra_gib}`), num(percent(each.hit_rate)), num(`+${(100 * each.adds).toFixed(1)} points`), num(`+${short(each.adds_tokens_per_s ?? 0)}`))), "What more memory would add") : null);
    return;
  }
  put(box, ...[told.words].flat(2).filter((line) => typeof line === "string").map((line) => make("p", { class: "note" }, line)), tree(Object.fromEntries(Object.entries(told).filter(([key]) => key !== "words"))));
}

// An answer as it is: numbers in words of their own keys, lists of alike things as tables.
function tree(told, depth = 0) {
  if (told === null || typeof told !== "object") return make("span", { class: "num" }, told === null ? "–" : typeof told === "number" ? short(told) : String(told));
  if (Array.isArray(told)) {
    const first = told[0];
    if (first && typeof first === "object" && !Array.isArray(first)) {
      const keys = Object.keys(first);
      return table(keys.map((key) => [key.replaceAll("_", " "), typeof first[key] === "number"]), told.slice(0, 40).map((row) => make("tr", {}, ...keys.map((key) => (typeof row[key] === "number" ? cell(short(row[key]), "n") : make("td", {}, tree(row[key], depth + 1)))))), "Answer");
    }
    return make("span", { class: "num" }, told.slice(0, 40).map((each) => (typeof each === "number" ? short(each) : String(each))).join(", "));
  }
  if (depth > 3) return make("span", {}, "…");
  return make("dl", { class: "facts wrap" }, ...Object.entries(told).map(([key, value]) => pair(key.replaceAll("_", " "), tree(value, depth + 1))));
}
