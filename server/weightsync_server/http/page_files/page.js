"use strict";
// Shows what the event stream of the server sends. What trainers and operators wrote goes into the
// page as text and never as markup: there is no innerHTML here, and the page's policy forbids it.

const EVENTS = "v1/weightsync/events", TOKEN = `weightsync token ${location.pathname}`;
const PHASES = ["prepare", "pause", "commit", "verify", "score", "resume"], PAUSED = [...PHASES.slice(1), "other"];
const SHOWN = 20, MOST_OPEN_RANKS = 16, RATE_S = 5, SILENCE_S = 25, MOST_NAMED = 3;
const parts = {};
const toggled = new Set();
const received = new Map();
const find = (id) => document.getElementById(id);

// Builds an element; attributes that begin with -- are properties of its style.
function el(tag, attributes, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value === undefined || value === false) continue;
    if (name.startsWith("--")) made.style.setProperty(name, value);
    else made.setAttribute(name, value);
  }
  made.append(...children.flat(3).filter((each) => each !== undefined && each !== ""));
  return made;
}

// Makes `old` equal to `fresh`, and keeps the elements that stay: with them focus and selection.
function morph(old, fresh) {
  for (const { name } of [...old.attributes])
    if (name !== "style" && !fresh.hasAttribute(name)) old.removeAttribute(name);
  for (const { name, value } of fresh.attributes)
    if (name !== "style" && old.getAttribute(name) !== value) old.setAttribute(name, value);
  if (old.style.cssText !== fresh.style.cssText) old.style.cssText = fresh.style.cssText;
  const keyed = new Map();
  for (const child of old.children) if (child.dataset.key) keyed.set(child.dataset.key, child);
  let at = old.firstChild;
  for (const next of [...fresh.childNodes]) {
    const key = next.dataset?.key;
    const found = key ? keyed.get(key) : at && !at.dataset?.key ? at : undefined;
    if (found?.nodeName !== next.nodeName) {
      old.insertBefore(next, at);
      continue;
    }
    if (found === at) at = at.nextSibling;
    else old.insertBefore(found, at);
    if (found.nodeType === Node.TEXT_NODE) {
      if (found.data !== next.data) found.data = next.data;
    } else morph(found, next);
  }
  while (at) {
    const gone = at;
    at = at.nextSibling;
    gone.remove();
  }
}

function show(id, ...children) {
  const target = find(id), fresh = target.cloneNode(false);
  fresh.append(...children.flat().filter((each) => each !== undefined));
  morph(target, fresh);
}

// A table with explicit roles: as cards, on a narrow screen, browsers would forget them.
// `rows` have a key, cells in the order of the columns, and what is below them while they are open.
function table(id, caption, columns, rows) {
  const cell = (content, at) => el(at ? "td" : "th", { role: at ? "cell" : "rowheader", scope: at ? undefined : "row", "data-label": columns[at], class: content?.class }, content?.content ?? content);
  const body = rows.flatMap(({ key, cells, detail }) => [
    el("tr", { role: "row", "data-key": `${id} ${key}` }, cells.map(cell)),
    detail && el("tr", { role: "row", class: "detail", id: detailId(id, key), "data-key": `${id} ${key} detail` },
      el("td", { role: "cell", colspan: columns.length }, detail)),
  ]);
  return el("table", { role: "table", "data-key": id },
    el("caption", {}, caption),
    el("thead", { role: "rowgroup" }, el("tr", { role: "row" }, columns.map((name) => el("th", { role: "columnheader", scope: "col" }, name)))),
    el("tbody", { role: "rowgroup" }, body));
}

const detailId = (id, key) => `${id}-${key}`.replace(/[^\w-]/g, (c) => `_${c.charCodeAt(0)}_`);
const isOpen = (key, first = false) => toggled.has(key) !== first;
function toggle(key, text, about, first, controls) {
  const open = isOpen(key, first);
  return el("button", { type: "button", "data-toggle": key, "aria-expanded": String(open), "aria-controls": open && controls },
    text, el("span", { class: "unseen" }, ` ${about}`));
}

function size(bytes) {
  for (const unit of ["B", "kB", "MB", "GB"]) {
    if (bytes < 1000) return `${bytes.toFixed(unit === "B" ? 0 : 1)} ${unit}`;
    bytes /= 1000;
  }
  return `${bytes.toFixed(1)} TB`;
}
const duration = (s) => (s === null || s === undefined ? "–" : s < 1 ? `${(s * 1e3).toFixed(1)} ms` : `${s.toFixed(2)} s`);
function age(time) {
  let passed = Math.max(0, (Date.now() - new Date(time)) / 1e3);
  for (const [unit, most, more] of [["s", 100, 60], ["min", 100, 60], ["h", 48, 24]]) {
    if (passed < most) return `${passed.toFixed(0)} ${unit}`;
    passed /= more;
  }
  return `${passed.toFixed(0)} days`;
}
const when = (time) => (time ? el("time", { datetime: time }, time.slice(0, 19).replace("T", " ")) : "–");
const words = (text) => text.replaceAll("_", " ");
const digest = (text) => (text ? el("span", { class: "digest", title: text }, text.slice(0, 12)) : "–");
const count = (number, noun) => `${number} ${noun}${number === 1 ? "" : "s"}`;
const each = (common, all) => String(common || [...new Set(all)].filter(Boolean).sort((a, b) => a - b).join(" and ") || "none");
// Sentences name fields of calls; people type commands, as the CLI shows them.
const remedy = (reason) => parts.remedies?.[reason];

const DOING = { prepare: "prepare", pause: "pause", commit: "commit and verify", score: "scoring probes", resume: "resume", wait: "waiting for other engines or the fleet", restore: "going back to the version before" };
const doing = ({ phase }) => DOING[phase] ?? words(phase);
// Without seconds: a screen reader says this line whenever it changes.
function runningText({ running_apply: running }, several) {
  if (!running) return "An apply is in progress";
  return `${running.version ? `Applying version ${running.version}` : "An apply is in progress"}: ${doing(running)}${several ? ` on engine ${running.engine}` : ""}`;
}

function stateOf(status) {
  const model = status.models[0], engines = model.engines;
  const away = engines.filter((one) => !["serving", "applying"].includes(one.state));
  if (!engines.length) return ["No engine is connected.", "bad"];
  const live = each(model.live_version, engines.map((one) => one.live_version));
  if (away.length > MOST_NAMED) return [`${away.length} of ${engines.length} engines do not serve.`, "bad"];
  if (away.length)
    return [away.map((one) => `Engine ${one.name} is ${words(one.state)}.`).join(" ") +
      (away.length < engines.length ? ` Of ${count(engines.length, "engine")} ${engines.length - away.length} can serve.` : ""), "bad"];
  if (model.apply_id) return [`${runningText(model, engines.length > 1)}; live until it ends: ${live === "none" ? "the engine's own weights" : `version ${live}`}.`, "busy"];
  const serving = live === "none" ? "weights without a version" : `version ${live}`;
  return [`Serving ${serving} on ${count(engines.length, "engine")}.`, ""];
}

function problemsOf(status) {
  const model = status.models[0], found = [];
  const add = (title, text, help, key) => found.push(el("li", { "data-key": key ?? title }, el("b", {}, title), text && el("p", {}, text), help && el("p", {}, `What to do: ${help}`)));
  for (const one of model.engines) {
    if (!["serving", "applying"].includes(one.state)) {
      const seen = one.state !== "away" ? "" : one.last_seen ? ` It last answered ${age(one.last_seen)} ago.` : " It has not answered since this server started.";
      add(`Engine ${one.name} is ${words(one.state)}`, one.reason + seen, { fenced: remedy("ENGINE_FENCED"), away: remedy("ENGINE_AWAY") }[one.state]);
    }
    for (const text of one.warnings) add(`Warning of engine ${one.name}`, text, "", `${one.name} ${text}`);
    for (const rank of one.ranks) {
      if (rank.error) add(`Rank ${rank.rank} of ${one.name} failed`, rank.error);
      if (rank.loader?.last_error) add(`The loader of rank ${rank.rank} of ${one.name} failed`, rank.loader.last_error);
    }
  }
  for (const disk of status.disks) if (disk.error) add(`Nothing more is written to the ${disk.folder} folder`, disk.error);
  for (const [name, times] of Object.entries(status.invariant_violations))
    if (times) add(`Invariant ${name} was violated ${count(times, "time")}`, "", "report it with the server's log; see the runbook");
  const last = model.last_apply;
  if (last && ["refused", "restored", "fenced", "interrupted"].includes(last.result))
    add(`The last ${words(last.kind)}${last.version ? ` of version ${last.version}` : ""} was ${last.result}`, last.reason, remedy(last.error_reason));
  else if (model.newest_not_live && !model.apply_id && model.engines.every((one) => one.state === "serving"))
    found.push(el("li", { "data-key": "newest", class: "note" }, el("b", {}, `Version ${model.newest_version} is not live`), el("p", {}, model.newest_not_live)));
  return found;
}

function showState() {
  const status = parts.status, model = status.models[0];
  const [text, kind] = stateOf(status), line = find("state");
  if (line.textContent !== text) line.textContent = text;
  line.className = kind;
  document.title = `${kind === "bad" ? "⚠ " : ""}${model.model}: ${text}`;
  find("model").textContent = model.model;
  const problems = problemsOf(status);
  show("problems", problems);
  find("attention").hidden = !problems.length;
  showFacts();
}

function showFacts() {
  const { status, versions } = parts, model = status.models[0];
  const committed = (number) => {
    const time = versions?.versions.find((one) => one.version === number)?.commit_time;
    return time ? `committed ${age(time)} ago` : "";
  };
  const fact = (name, value, ...more) => el("div", {}, el("dt", {}, name), el("dd", {}, value), more.filter(Boolean).map((text) => el("dd", { class: "soft" }, text)));
  const live = each(model.live_version, model.engines.map((one) => one.live_version));
  const back = each(model.rollback_version, model.engines.map((one) => one.rollback_version));
  const last = model.last_apply, running = model.running_apply, pending = running?.pending_ranks ?? [];
  show("facts",
    running && fact("Apply in progress", doing(running), `for ${age(running.phase_began)}, begun ${age(running.began)} ago`,
      `version ${running.previous_version || "?"} → ${running.version || "?"}, engine ${running.engine}`, pending.length ? `not done: rank ${pending.join(", ")}` : ""),
    fact("Live version", live, committed(model.live_version), digest(model.live_content_digest)),
    fact("Newest version", String(model.newest_version || "none"), committed(model.newest_version)),
    fact("Rollback would apply", back, model.rollback_version ? (model.rollback_resident ? "in memory" : "has to be read or loaded first") : ""),
    last ? fact(`Last ${words(last.kind)}`, words(last.result), `version ${last.previous_version || "?"} → ${last.version || "?"}, ${age(last.time)} ago`, last.phases && `paused ${duration(last.phases.paused_total_s)}`) : fact("Last apply", "none"));
  find("server").textContent = `weightsync-server ${status.server_version}, up for ${age(status.start_time)}, store ${status.store}${status.durable ? "" : " (versions end with the server)"}`;
}

function showEngines() {
  const { engines } = parts.status.models[0];
  const few = engines.reduce((sum, one) => sum + one.ranks.length, 0) <= MOST_OPEN_RANKS;
  const rows = engines.map((one) => {
    const key = `engine ${one.name}`, proved = one.ranks.filter((rank) => rank.version && rank.version === one.live_version && rank.content_digest === one.live_content_digest && !rank.error);
    const whole = proved.length === one.ranks.length && proved.length > 0;
    const kind = { serving: "good", applying: "warn" }[one.state] ?? "bad", known = kind !== "bad";
    const ranks = () => table(`ranks ${one.name}`, `Ranks of engine ${one.name}`, ["Rank", "Live version", "Proved content", "Weights", "Error"], one.ranks.map((rank) => ({
      key: rank.rank, cells: [rank.rank, rank.version ? String(rank.version) : "no whole version", digest(rank.content_digest),
        [rank.transform === "twin" ? "loaded beside generation" : "copied", rank.loader ? `, loader ${words(rank.loader.state)}` : "", rank.device_used_bytes ? `, ${size(rank.device_used_bytes)} of device memory` : ""].join(""),
        { content: rank.error || "none", class: rank.error ? "bad" : "" }],
    })));
    return {
      key, detail: one.ranks.length && isOpen(key, few) ? ranks() : undefined,
      cells: [one.name, { content: words(one.state), class: kind }, String(one.live_version || "none"),
        { content: `${proved.length} of ${count(one.ranks.length, "rank")}${known ? "" : " when it last served"}${one.gate ? `; ${gateText(one.gate)}` : ""}`, class: known && whole ? "good" : "" },
        digest(one.live_content_digest), one.kind + (!["", "none"].includes(one.vllm_version) ? `, vLLM ${one.vllm_version}` : ""),
        one.ranks.length ? toggle(key, "Ranks", `of engine ${one.name}`, few, detailId("engine-rows", key)) : "none"],
    };
  });
  show("engines", rows.length ? table("engine-rows", "Engines of this host", ["Engine", "State", "Live version", "Proved on", "Content", "Kind", "Ranks"], rows) : el("p", {}, "This server has no engine."));
}

function rate(push) {
  const samples = received.get(push.push_id) ?? [];
  const first = samples[0], last = samples.at(-1);
  return samples.length < 2 ? undefined : (last.bytes - first.bytes) / ((last.at - first.at) / 1e3);
}

function samplePushes() {
  const pushes = parts.status?.models[0].pushes ?? [], at = performance.now();
  for (const id of received.keys()) if (!pushes.some((one) => one.push_id === id)) received.delete(id);
  for (const one of pushes) {
    const samples = received.get(one.push_id) ?? [];
    samples.push({ at, bytes: one.received_bytes });
    received.set(one.push_id, samples.filter((sample) => at - sample.at <= RATE_S * 1e3));
  }
}

function showPushes() {
  const rows = parts.status.models[0].pushes.map((one) => {
    const speed = rate(one), total = one.declared_bytes;
    const left = speed && total > one.received_bytes ? `, ${duration((total - one.received_bytes) / speed)} left` : "";
    const missing = [["not begun", one.absent_writers], ["unfinished", one.unfinished_writers]].filter(([, all]) => all.length).map(([text, all]) => `${text}: ${all.join(", ")}`);
    return {
      key: one.push_id,
      cells: [String(one.version),
        { class: "bars", content: el("progress", { max: total || 1, value: total ? one.received_bytes : 0, "aria-label": `Push of version ${one.version}` }) },
        `${size(one.received_bytes)} of ${size(total)}${total ? ` (${Math.floor((100 * one.received_bytes) / total)} %)` : ""}`,
        speed === undefined ? "–" : `${size(speed)}/s${left}`, String(one.streams),
        (one.writers ? `${count(one.writers, "writer")}${missing.length ? `; ${missing.join("; ")}` : ""}` : "one writer") + (one.layout_check === "unchecked" ? "; layout not checked by an engine" : ""),
        el("span", { class: "digest" }, one.push_id)],
    };
  });
  show("pushes", rows.length ? table("push-rows", "Pushes that bring a version now", ["Version", "Progress", "Received", "Rate", "Streams", "Writers", "Push"], rows) : el("p", {}, "No push is open."));
}

// Seconds of each phase; what is in none of them is the wait of an engine for the others.
function secondsOf(phases) {
  const found = Object.fromEntries(PHASES.map((name) => [name, phases[`${name}_s`] ?? 0]));
  const known = PAUSED.reduce((sum, name) => sum + (found[name] ?? 0), 0);
  found.other = Math.max(0, (phases.paused_total_s ?? 0) - known);
  found.paused = known + found.other;
  return found;
}

// Most applies score nothing.
const shownOf = (phases) => PHASES.filter((name) => name !== "score" || phases.score_s);
const gateText = ({ outcome, reason, k3, k3_limit: limit, tokens }) => `gate ${outcome === "unspecified" ? "off" : words(outcome)}` +
  (tokens ? ` (k3 ${k3.toPrecision(2)}, limit ${limit.toPrecision(2)})` : "") + (reason ? `: ${reason}` : "");
// Logarithmic: pauses of milliseconds and of seconds are in one table.
const length = (total, most) => (most ? (100 * Math.log1p(total * 1e3)) / Math.log1p(most * 1e3) : 0);

function bars(phases, longest) {
  const seconds = secondsOf(phases);
  const bar = (names, total, most) => el("span", { class: "bar", "--width": `${length(total, most)}%` },
    names.filter((name) => seconds[name]).map((name) => el("span", { class: name, "--part": String(seconds[name] / total) })));
  return el("div", { role: "img", "aria-label": [...shownOf(phases), "other"].map((name) => `${name} ${duration(seconds[name])}`).join(", ") },
    bar(["prepare"], seconds.prepare, longest.prepare), bar(PAUSED, seconds.paused, longest.paused));
}

function applyDetail(one) {
  const reports = one.engines.filter((engine) => engine.report), absent = one.engines.filter((engine) => !engine.report);
  const ranks = reports.flatMap(({ engine, report }) => report.ranks.map((rank) => ({
    key: `${engine} ${rank.rank}`, cells: [engine, rank.rank, size(rank.written_bytes), duration(rank.commit_s), duration(rank.verify_s), digest(rank.content_digest), { content: rank.error || "none", class: rank.error ? "bad" : "" }],
  })));
  const line = (text) => el("p", {}, text), help = remedy(one.error_reason);
  return [
    one.reason && line(one.reason), help && line(`What to do: ${help}`), one.cause && line(`Cause: ${one.cause}`),
    line(`Asked for by ${one.requested_by}. ${one.apply_id ? `Apply ${one.apply_id}.` : "Nothing was begun."} It took ${duration(one.took_s)}.`),
    one.phases && line(`Written: ${size(one.written_bytes)}, ${one.strategy}. ${shownOf(one.phases).map((name) => `${name} ${duration(one.phases[`${name}_s`])}`).join(", ")}; paused ${duration(one.phases.paused_total_s)}.`),
    one.gate && line(`${gateText(one.gate)}.`),
    absent.map(({ engine, absent: why }) => line(`Engine ${engine} took no part: ${why}`)),
    ranks.length ? table(`apply-ranks ${one.number}`, `Ranks of apply ${one.number}`, ["Engine", "Rank", "Written", "Commit", "Verify", "Proved content", "Error"], ranks) : line("No rank is recorded."),
  ].flat().filter(Boolean);
}

function showApplies() {
  const { applies } = parts.applies;
  const all = applies.filter((one) => one.phases).map((one) => secondsOf(one.phases));
  const longest = { prepare: Math.max(0, ...all.map((one) => one.prepare)), paused: Math.max(0, ...all.map((one) => one.paused)) };
  const rows = applies.map((one) => {
    const key = `apply ${one.number}`, good = ["applied", "already_live", "planned"].includes(one.result);
    return {
      key, detail: isOpen(key) ? applyDetail(one) : undefined,
      cells: [when(one.time), words(one.kind) + (one.order === "rolling" ? " rolling" : "") + (one.engine ? ` on ${one.engine}` : ""),
        `${one.previous_version || "?"} → ${one.version || "?"}`,
        { content: words(one.result) + (one.times > 1 ? ` ${one.times} times` : ""), class: good ? "good" : "bad" },
        one.phases ? duration(one.phases.paused_total_s) : "–",
        { class: "bars", content: one.phases ? bars(one.phases, longest) : "–" },
        toggle(key, "Ranks", `of apply ${one.number}`, false, detailId("apply-rows", key))],
    };
  });
  const legend = el("ul", { class: "legend" }, [...PHASES, "other"].map((name) => el("li", {}, el("span", { class: name }), { prepare: "prepare (upper bar; generation runs)", other: "other (waiting)" }[name] ?? name)));
  show("applies", rows.length ? [legend, table("apply-rows", "Newest first; times in UTC; the length of a bar is logarithmic", ["Began", "What", "Version", "Result", "Paused", "Phases", "Details"], rows)] : el("p", {}, "No apply is recorded."));
}

const PLACES = { absent: "in the store only", staging: "being read into memory", staged: "in memory", device: "in an engine's memory only" };
const kindOf = (one) => (one.serving === "live" ? "live" : one.serving === "rejected" ? "rejected" : one.kind === "delta" ? "delta" : "full");

function pusherOf({ client_run: run, metadata, epoch }) {
  const found = [metadata.run_id, run && `client ${run}`].filter(Boolean).join(", ");
  return found || (epoch ? `epoch ${epoch}` : "the engine's checkpoint");
}

function showVersions() {
  const { versions, next_page_token: more } = parts.versions, lasting = parts.status?.durable;
  const all = isOpen("versions"), largest = Math.max(1, ...versions.map((one) => one.stored_bytes || one.size_bytes));
  const strip = el("div", { class: "timeline", "aria-hidden": "true" }, versions.toReversed().map((one) =>
    el("span", { "data-key": String(one.version), class: kindOf(one), title: `version ${one.version}, ${size(one.stored_bytes || one.size_bytes)}`, "--height": `${Math.max(4, (100 * (one.stored_bytes || one.size_bytes)) / largest)}%` })));
  const rows = (all ? versions : versions.slice(0, SHOWN)).map((one) => ({
    key: String(one.version),
    cells: [el("b", {}, String(one.version)),
      { class: { live: "good", rejected: "bad" }[one.serving], content: one.serving === "live" ? `live${one.live_check === "passed" ? ", all of it compared" : one.live_check === "pending" ? ", changes compared" : one.live_check === "failed" ? ", comparison failed" : ""}` : one.serving === "rejected" ? `rejected: ${one.rejected_reason}` : one.pinned ? "pinned" : "–" },
      when(one.commit_time), size(one.size_bytes),
      one.kind === "delta" ? `delta of ${one.base_version}, ${size(one.stored_bytes)} stored, ${(100 * one.changed_fraction).toFixed(2)} % changed` : one.commit_time ? "full" : "–",
      pusherOf(one), one.metadata.step ?? "–",
      { receiving: "not yet", committed: lasting === false ? "until the server ends" : "yes", failed: "no: the push failed" }[one.durability] ?? one.durability,
      PLACES[one.residency] ?? one.residency],
  }));
  const legend = el("ul", { class: "legend", "aria-hidden": "true" }, [["full", "full"], ["delta", "delta"], ["live", "live"], ["rejected", "rejected"]].map(([name, text]) => el("li", {}, el("span", { class: name }), text)));
  const button = versions.length > SHOWN ? el("p", {}, toggle("versions", all ? `Show the newest ${SHOWN}` : `Show all ${versions.length}`, "versions")) : undefined;
  const caption = `${count(versions.length, "version")}, newest first; times in UTC` + (more ? "; older ones: weightsync versions" : "");
  show("versions", versions.length ? [strip, legend, table("version-rows", caption, ["Version", "State", "Committed", "Size", "Stored as", "Pushed by", "Step", "Durable", "Where"], rows), button] : el("p", {}, "There is no version yet: push one."));
}

function showMemory() {
  const { status } = parts, model = status.models[0], used = status.memory_reserved_bytes, limit = status.memory_limit_bytes;
  const slots = model.slots.map((one) => ({
    key: String(one.slot), cells: [String(one.slot), one.state, String(one.version || "none"), `${size(one.used_bytes)} of ${size(one.reserved_bytes)}`, String(one.leases)],
  }));
  const disks = status.disks.map((one) => ({
    key: one.folder, cells: [one.folder, el("code", {}, one.path), { class: "bars", content: el("meter", { min: 0, max: one.free_bytes + one.used_bytes || 1, value: one.used_bytes, "aria-label": `Disk of ${one.folder}` }) },
      `${size(one.free_bytes)} free, ${size(one.used_bytes)} used`, { content: one.error ? "full" : "yes", class: one.error ? "bad" : "good" }],
  }));
  show("memory",
    el("p", { id: "memory-text" }, `Shared memory: ${size(used)} of ${size(limit)} reserved`),
    el("meter", { min: 0, max: limit || 1, value: used, "aria-labelledby": "memory-text" }),
    table("slot-rows", "Slots of shared memory", ["Slot", "State", "Version", "In use", "Readers"], slots),
    table("disk-rows", "Disks", ["Folder", "Path", "Use", "Room", "Written to"], disks));
}

function showFleet() {
  const fleet = parts.fleet;
  find("fleet-section").hidden = !fleet;
  if (!fleet) return;
  if (fleet.error) return show("fleet", el("p", { class: "bad" }, `The fleet cannot be read: ${fleet.error}`));
  const apply = fleet.newest, progress = new Map((apply?.members ?? []).map((one) => [one.name, one]));
  const on = fleet.members.filter((one) => one.live_version === fleet.decided_version && one.state === "serving").length;
  const rows = fleet.members.map((one) => {
    const at = progress.get(one.name), why = one.reason || at?.reason;
    return {
      key: one.name,
      cells: [one.name + (one.name === fleet.member ? " (this server)" : ""),
        { content: String(one.live_version || "none"), class: one.live_version === fleet.decided_version ? "good" : "warn" },
        { content: one.state + (why ? `: ${why}` : ""), class: one.state === "fenced" ? "bad" : "" },
        at ? (at.done ? "done" : at.ready ? "paused and ready" : at.prepared ? "prepared" : "not prepared") : "no part",
        digest(one.content_digest), one.release ? one.release + (one.older ? ", older: update it" : "") : "–", one.address || "–"],
    };
  });
  const text = apply ? `Apply ${apply.apply}${apply.order ? `, ${apply.order}` : ""}, of version ${apply.version}: ${apply.decision || "not decided"}${apply.reason ? ` (${apply.reason})` : ""}, ${apply.decisions} of ${apply.decisions_needed} decisions.` : "No apply yet.";
  show("fleet",
    el("p", {}, `Fleet ${fleet.fleet}: ${fleet.decided_version ? `version ${fleet.decided_version} is decided` : "nothing is decided"}; ${on} of ${count(fleet.members.length, "member")} serve it; skew ${fleet.skew}. ${text}`),
    table("member-rows", `Members of fleet ${fleet.fleet}`, ["Member", "Version", "State", "Last apply", "Content", "Release", "Address"], rows));
}

const SHOW = {
  status: [showState, showEngines, showPushes, showMemory], versions: [showVersions, showFacts], applies: [showApplies], fleet: [showFleet],
  remedies: [],
};

function take(name, data) {
  if (!Object.hasOwn(SHOW, name)) return;
  parts[name] = data;
  if (!parts.status) return;
  find("status").hidden = false;
  for (const part of SHOW[name]) part();
}

document.addEventListener("click", ({ target }) => {
  const button = target.closest("[data-toggle]");
  if (!button) return;
  const { toggle: key } = button.dataset;
  toggled.has(key) ? toggled.delete(key) : toggled.add(key);
  for (const [name, shows] of Object.entries(SHOW)) if (parts[name]) for (const part of shows) part();
});

function say(text) {
  if (find("connection").textContent !== text) find("connection").textContent = text;
}

// Yields the events of a stream; comments keep it alive.
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  for (let text = "", next; !(next = await reader.read()).done; ) {
    heard = performance.now();
    const blocks = (text += next.value).split("\n\n");
    text = blocks.pop();
    for (const block of blocks) {
      const [, name, data] = /^event: (.*)\ndata: (.*)$/.exec(block) ?? [];
      if (name) yield [name, JSON.parse(data)];
    }
  }
}

let following, heard = 0;
let wake = () => {};

function ask(why) {
  find("access").hidden = false;
  find("status").hidden = true;
  find("access-why").textContent = why;
  say("A token is needed");
  find("token").focus();
  return new Promise((given) => (wake = given));
}

const AWAY = "The server does not answer; what is shown is from before. Trying again";
// Follows the stream once; returns seconds until the next attempt, and what to say until then.
async function follow() {
  const token = sessionStorage.getItem(TOKEN);
  following = new AbortController();
  heard = performance.now();
  const reply = await fetch(EVENTS, { headers: token ? { Authorization: `Bearer ${token}` } : {}, signal: following.signal, cache: "no-store" });
  if (!reply.ok) {
    const { error, reason } = await reply.json();
    if (["UNAUTHENTICATED", "PERMISSION_DENIED"].includes(reason)) {
      await ask(token || reason === "PERMISSION_DENIED" ? `The server refused ${token ? "the token" : "this page"}: ${error}.` : "This server takes a token with the role read.");
      return [0, ""];
    }
    return [Number(reply.headers.get("Retry-After")) || 5, `Refused: ${error}. Trying again`];
  }
  find("access").hidden = true;
  for (const name of Object.keys(parts)) delete parts[name];
  find("fleet-section").hidden = true;
  say("Connected; what is shown is live");
  for await (const [name, data] of events(reply.body)) {
    if (name === "refused") return [0, ""];
    take(name, data);
  }
  return [1, AWAY];
}

async function run() {
  for (let failed = 0; ; ) {
    let pause, text;
    try {
      // A tab may be opened hidden, and is not followed before it is shown.
      [pause, text] = document.hidden ? [0, ""] : await follow();
      failed = 0;
    } catch {
      [pause, text] = [Math.min(10, 2 ** failed++), AWAY];
    }
    if (document.hidden) say("Not followed while this tab is hidden");
    else if (pause) say(text);
    if (document.hidden || pause) await new Promise((over) => {
      wake = over;
      if (!document.hidden) setTimeout(over, pause * 1e3);
    });
  }
}

find("access").addEventListener("submit", (event) => {
  event.preventDefault();
  const token = find("token").value.trim();
  if (!/^[\x21-\x7e]+$/.test(token)) {
    find("access-why").textContent = "A token has letters, digits and signs, without a space; type it again.";
    return;
  }
  sessionStorage.setItem(TOKEN, token);
  find("token").value = "";
  wake();
});
// A hidden page costs the server nothing.
document.addEventListener("visibilitychange", () => (document.hidden ? following?.abort() : wake()));
setInterval(() => {
  // The server says something every 10 s: a connection that is silent is dead, and shows the past.
  if (performance.now() - heard > SILENCE_S * 1e3) following?.abort();
  if (!parts.status) return;
  samplePushes();
  if (received.size) showPushes();
  showFacts();
}, 1000);
run();
