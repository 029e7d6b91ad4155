"""How the page looks: light or dark as the reader's system is, in one column on a phone."""

from __future__ import annotations

STYLE = """
:root { --ink: #1d2329; --soft: #5c6873; --paper: #ffffff; --panel: #f4f6f8; --line: #d8dee4;
  --m0: #0b62c4; --m1: #c2410c; --m2: #7c3aed; --m3: #15803d; --m4: #a16207; --m5: #0e7490; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6eaee; --soft: #9aa7b3; --paper: #14181c; --panel: #1e242a; --line: #39434d;
    --m0: #6db1ff; --m1: #ff9b66; --m2: #c4a3ff; --m3: #62d58b; --m4: #e5c04d; --m5: #5cd3ea; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink); line-height: 1.45;
  font-family: system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
main { max-width: 1160px; margin: 0 auto; padding: 16px; }
h1 { font-size: 1.5rem; margin: 0 0 4px; }
h2 { font-size: 1.2rem; margin: 28px 0 2px; overflow-wrap: anywhere; }
h2 small, p, figcaption { color: var(--soft); font-weight: normal; font-size: .9rem; }
p { margin: 0 0 10px; overflow-wrap: anywhere; }
ul { padding: 0; margin: 0 0 10px; list-style: none; }
h3 { font-size: 1rem; margin: 12px 0 2px; }
.ceilings { display: grid; grid-template-columns: repeat(auto-fill, minmax(150px, 1fr)); gap: 8px; }
.ceilings li { background: var(--panel); border-radius: 8px; padding: 8px 10px; }
.ceilings b { display: block; font-size: 1.05rem; white-space: nowrap; }
.ceilings span { display: block; font-size: .85rem; }
.ceilings small { display: block; color: var(--soft); font-size: .75rem; line-height: 1.25;
  overflow-wrap: anywhere; }
.legend { display: flex; flex-wrap: wrap; gap: 4px 14px; font-size: .85rem; }
.legend svg { vertical-align: -1px; }
.figures { display: grid; gap: 16px; align-items: start;
  grid-template-columns: repeat(auto-fill, minmax(min(100%, 340px), 1fr)); }
figure { margin: 0; background: var(--panel); border-radius: 10px; padding: 10px; min-width: 0; }
figcaption b { color: var(--ink); }
figure svg { display: block; width: 100%; height: auto; margin-top: 6px; }
svg text { fill: var(--ink); font-size: 11.5px; }
svg .tick, svg .detail { fill: var(--soft); font-size: 10px; }
svg .grid { stroke: var(--line); stroke-width: 1; }
svg .rule { stroke: var(--line); stroke-width: 1; }
svg .roof { stroke: var(--soft); stroke-width: 1.5; fill: none; }
svg .mark { fill-opacity: .85; stroke: var(--panel); stroke-width: .6; }
.m0 { fill: var(--m0); } .m1 { fill: var(--m1); } .m2 { fill: var(--m2); }
.m3 { fill: var(--m3); } .m4 { fill: var(--m4); } .m5 { fill: var(--m5); }
details { margin: 14px 0; }
summary { cursor: pointer; padding: 6px 0; font-weight: 600; }
details li { font-size: .85rem; overflow-wrap: anywhere; padding: 3px 0; }
table { border-collapse: collapse; width: 100%; font-size: .85rem; }
th, td { text-align: right; padding: 4px 8px; border-bottom: 1px solid var(--line); }
th:nth-child(-n+4), td:nth-child(-n+4) { text-align: left; }
td { font-variant-numeric: tabular-nums; }
@media (max-width: 820px) {
  thead { display: none; }
  table, tbody { display: block; }
  tr { display: grid; grid-template-columns: repeat(3, minmax(0, 1fr)); gap: 2px 8px;
    padding: 8px 0; border-bottom: 1px solid var(--line); }
  td, td:nth-child(-n+4) { display: block; border: 0; padding: 0; text-align: left;
    overflow-wrap: anywhere; }
  td:first-child { font-weight: 600; }
  td:nth-child(2), td:nth-child(4) { grid-column: span 2; }
  td:nth-child(n+5)::before { content: attr(data-name); display: block; color: var(--soft);
    font-size: .7rem; }
}
"""
