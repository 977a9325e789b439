"""How the page of a plan looks; colours are those of the timelines of pipelines."""

from __future__ import annotations

STYLE = """
:root { color-scheme: light dark; --line: #8886 }
body { font: 14px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 1100px;
  padding: 0 1rem }
h1 { font-size: 1.4rem } h2 { margin: 2rem 0 .4rem; font-size: 1.1rem }
h3 { margin: 0 0 .6rem; font-size: 1rem }
dl { display: flex; flex-wrap: wrap; gap: .6rem } dd { margin: 0; font-weight: 600 }
dl div { border: 1px solid var(--line); border-radius: 6px; padding: .4rem .8rem }
dt, .words, .times, p.note { opacity: .75 }
.key { display: flex; flex-wrap: wrap; gap: .2rem 1.2rem } .key i { display: inline-block;
  width: 1em; height: 1em; margin-right: .4em; vertical-align: -.1em }
.row { display: grid; grid-template-columns: 15rem 1fr 20rem; gap: .2rem 1rem; align-items: center;
  padding: .25rem 0; border-bottom: 1px solid #8883; overflow-wrap: anywhere }
.bar { display: flex; height: .8rem; margin: 1px 0 } .bar i { display: block }
.bar.memory { height: 1.6rem; border: 1px solid var(--line) }
i.held { background: #3b7dd8 } i.sum { background: #e08a2b } i.compute { background: #3a9d5d }
i.hidden { background: #9b5fc0 } i.exposed { background: #d0453e }
i.parameters { background: #3b7dd8 } i.gradients { background: #b8437f }
i.optimizer_state { background: #2aa3a3 } i.saved_activations { background: #d9b93b }
i.recomputed { background: #6b5bd2 } i.loss { background: #e59aa5 }
i.gathered_ahead { background: #7a8794 } i.in_flight { background: #a6553a }
.step { display: flex; align-items: flex-end; height: 9rem; border-bottom: 1px solid var(--line) }
.step div { flex: 1; height: 100%; display: flex; flex-direction: column-reverse }
.step i { display: block }
article { border: 1px solid var(--line); border-radius: 6px; padding: .8rem; margin: .8rem 0 }
.tensor-row { display: flex; flex-wrap: wrap; gap: .4rem 1rem; align-items: center;
  padding: .4rem 0; border-top: 1px solid #8883 }
.tensor-row .name { flex: 1 1 16rem; overflow-wrap: anywhere } .ways { flex: 2 1 20rem }
.tensor-row .why[open] { flex-basis: 100%; order: 1 }
.way { display: flex; gap: .8rem; align-items: center; margin: .2rem 0 }
.way span { flex: 1; text-align: right; font-size: .9em; overflow-wrap: anywhere }
.shards, .arrow { flex: none }
summary { cursor: pointer; padding: .2rem 0 } pre { overflow-x: auto; margin: .3rem 0 }
.wide { overflow-x: auto } table { border-collapse: collapse }
td, th { padding: .2rem .8rem; text-align: left; border-bottom: 1px solid #8883 }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums }
td.shard { background: #3b7dd833 } td.partial { background: #e08a2b33 }
@media (max-width: 700px) { .row { grid-template-columns: 1fr } body { margin: 1rem auto } }
""".strip()
