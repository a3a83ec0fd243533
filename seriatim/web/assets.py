"""The style sheet, the script and the icon of all pages. They are served as files of their own, and
no address is in them.

The script takes over the colours of the Airflow around the page. Every few seconds it replaces the
content by fresh content and keeps the scroll position. Without it a page is as readable, and stays
as it was when it was loaded.

Next: web/app.py serves them; operations/report_page.py has the style of reports, which this style
sheet extends.
"""

from __future__ import annotations

STYLE_SHEET = """
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; }
body { margin: 0 auto; max-width: 92rem; padding: 1.2rem clamp(.8rem, 2.5vw, 2rem) 3rem; }
a { color: var(--done); text-decoration: none; } a:hover, a:focus-visible { text-decoration: underline; }
header { display: flex; flex-wrap: wrap; align-items: baseline; gap: .2rem 1rem; margin-bottom: 1rem; }
header h1 { margin: 0; font-size: 1.45rem; letter-spacing: -.01em; overflow-wrap: anywhere; }
header .crumbs { flex-basis: 100%; color: var(--soft); font-size: .85rem; }
header .when { margin-left: auto; color: var(--soft); font-size: .85rem; }
h2 { margin: 2.2rem 0 .6rem; font-size: 1.05rem; }
code, pre { font: .86em/1.5 ui-monospace, "SF Mono", Menlo, Consolas, monospace; }
.soft { color: var(--soft); } .warn { color: var(--warn); } .small { font-size: .85rem; }
.chip { display: inline-block; padding: .05rem .6rem; border-radius: 1rem; font-size: .82rem; font-weight: 600;
  white-space: nowrap; border: 1px solid currentColor; color: var(--soft); }
.chip.good { color: var(--good); } .chip.warn { color: var(--warn); }
.chip.bad { color: var(--page); background: var(--bad); border-color: var(--bad); }
.cards { display: grid; grid-template-columns: repeat(auto-fill, minmax(8.6rem, 1fr)); gap: .7rem; margin: 0 0 1rem; }
.card { min-width: 0; padding: .65rem .9rem; } .card b { font-weight: 650; overflow-wrap: anywhere; }
.card .warn { color: var(--warn); }
.wide { overflow-x: auto; margin: 0 -.2rem; padding: 0 .2rem; }
table { font-size: .92rem; } th { font-size: .8rem; white-space: nowrap; vertical-align: bottom; }
th, td { padding: .45rem 1rem .45rem 0; overflow-wrap: normal; }
td.name { overflow-wrap: anywhere; min-width: 9rem; } td.name a { font-weight: 650; }
td.name small { display: block; color: var(--soft); }
td.number { white-space: nowrap; } td.cause { overflow-wrap: anywhere; min-width: 12rem; }
tr.more td { border-top: 0; padding-top: 0; } tr.has-more td { border-bottom: 0; }
tr:target td { background: var(--card); }
.need { border-left: .3rem solid var(--warn); background: var(--card); border-radius: .4rem; padding: .5rem .9rem;
  margin: .5rem 0; overflow-wrap: anywhere; }
.need.bad-edge { border-color: var(--bad); } .need b { margin-right: .5rem; }
.need pre { margin: .4rem 0 0; padding: 0; background: none; border: 0; white-space: pre-wrap; }
svg.strip { width: 100%; min-width: 7rem; max-width: 16rem; height: 1rem; }
svg.bar { width: 100%; min-width: 9rem; height: .9rem; border-radius: .25rem; }
svg.chart { width: 100%; height: auto; max-height: 15rem; background: var(--card); border-radius: .5rem; }
svg .good { fill: var(--good); } svg .warn { fill: var(--wait); } svg .bad { fill: var(--bad); }
svg .none { fill: var(--line); } svg .rate { fill: var(--done); opacity: .55; }
svg .lag { fill: none; stroke: var(--wait); stroke-width: 2.5; stroke-linejoin: round;
  vector-effect: non-scaling-stroke; }
svg .dot { fill: var(--wait); } svg .axis { stroke: var(--line); } svg text { fill: var(--soft); font-size: 12px; }
.key { display: inline-block; width: .75rem; height: .75rem; border-radius: .15rem; margin: 0 .35rem 0 1rem;
  vertical-align: -.08rem; }
.key.rate { background: var(--done); opacity: .55; } .key.lag { background: var(--wait); }
.key.done { background: var(--done); } .key.wait { background: var(--wait); } .key.halt { background: var(--bad); }
.key.good { background: var(--good); }
details > summary { cursor: pointer; color: var(--soft); }
footer { margin-top: 2.5rem; color: var(--soft); font-size: .82rem; overflow-wrap: anywhere; }
#stale { display: none; } #stale.shown { display: inline; color: var(--warn); margin-left: .8rem; }
@media (max-width: 46rem) {
  .stack thead { display: none; } .stack, .stack tbody { display: block; width: 100%; }
  .stack tr { display: grid; grid-template-columns: repeat(3, 1fr); gap: .35rem .8rem; padding: .7rem 0;
    border-bottom: 1px solid var(--line); }
  .stack tr.has-more { border-bottom: 0; padding-bottom: .3rem; } .stack tr.more { display: block; padding-top: 0; }
  .stack td { display: block; border: 0; padding: 0; text-align: left; min-width: 0; overflow-wrap: anywhere; }
  .stack td.number { text-align: left; } .stack tr.more td { display: block; }
  .stack td[data-label]::before { content: attr(data-label); display: block; color: var(--soft); font-size: .74rem; }
  .stack td.name, .stack td[data-label="log"], .stack td[data-label="state"] { grid-column: 1 / -1; }
  .stack td:empty { display: none; } .cards { grid-template-columns: repeat(3, 1fr); gap: .5rem; }
  .card { padding: .5rem .6rem; } .card b { font-size: 1rem; } .card span { font-size: .76rem; }
  header .when { margin-left: 0; flex-basis: 100%; }
}
"""
REFRESH_SCRIPT = """
(function () {
  "use strict";
  var EVERY_MS = 15000;
  function colours() {
    var theme = null;
    try { theme = localStorage.getItem("theme"); } catch (error) { theme = null; }
    if (theme === "light" || theme === "dark") { document.documentElement.dataset.theme = theme; }
    else { delete document.documentElement.dataset.theme; }
  }
  function tell(text) {
    var line = document.getElementById("stale");
    if (line) { line.textContent = text; line.classList.toggle("shown", text !== ""); }
  }
  function swap(text) {
    var fresh = new DOMParser().parseFromString(text, "text/html").querySelector("main");
    var old = document.querySelector("main");
    if (!fresh || !old) { return; }
    var sideways = Array.from(old.querySelectorAll(".wide"), function (one) { return one.scrollLeft; });
    old.querySelectorAll("details[open][id]").forEach(function (one) {
      var same = fresh.querySelector("#" + CSS.escape(one.id));
      if (same) { same.setAttribute("open", ""); }
    });
    old.replaceWith(fresh);
    fresh.querySelectorAll(".wide").forEach(function (one, i) { one.scrollLeft = sideways[i] || 0; });
  }
  function refresh() {
    if (document.hidden || !document.querySelector("main[data-fresh]")) { return; }
    fetch(location.href, { credentials: "same-origin", headers: { "Accept": "text/plain" }, redirect: "error" })
      .then(function (answer) {
        if (answer.status === 401) { throw new Error("you are logged out: load the page again"); }
        if (!answer.ok) { throw new Error("the server answers " + answer.status); }
        return answer.text();
      })
      .then(function (text) { swap(text); tell(""); })
      .catch(function (error) { tell("not refreshed: " + error.message); });
  }
  colours();
  addEventListener("storage", colours);
  setInterval(refresh, EVERY_MS);
  addEventListener("visibilitychange", refresh);
})();
"""
ICON_SVG = """
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 24 24">
<g fill="#3b8edb">
<rect x="2" y="4" width="20" height="3.6" rx="1.2"/>
<rect x="2" y="10.2" width="14" height="3.6" rx="1.2"/>
<rect x="2" y="16.4" width="8" height="3.6" rx="1.2"/>
</g>
<rect x="17.6" y="10.2" width="4.4" height="3.6" rx="1.2" fill="#e3a13b"/>
</svg>
"""
