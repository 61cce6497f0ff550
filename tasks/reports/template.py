"""The page of a report: HTML with its style, and nothing to load or to run."""

from __future__ import annotations

STYLE = """
:root {
  color-scheme: light dark;
  --paper: #ffffff; --ground: #f5f6f8; --ink: #1d2330; --soft: #5c6577;
  --line: #dfe3ea; --accent: #0072b2; --stripe: #f8f9fb;
}
@media (prefers-color-scheme: dark) {
  :root {
    --paper: #1b1f27; --ground: #12151b; --ink: #e6e9ef; --soft: #9aa4b6;
    --line: #303644; --accent: #6cb8ea; --stripe: #20252f;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0; padding: 2.5rem 1rem 4rem; background: var(--ground); color: var(--ink);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", sans-serif;
}
main, header, nav { max-width: 62rem; margin: 0 auto; }
h1 { font-size: 1.9rem; line-height: 1.2; letter-spacing: -0.015em; margin: 0 0 1.25rem; }
h2 { font-size: 1.2rem; line-height: 1.3; margin: 0 0 0.75rem; }
h1, h2, td, p, figcaption { overflow-wrap: anywhere; }
p { margin: 0 0 1rem; max-width: 46rem; }
nav ul { display: flex; flex-wrap: wrap; gap: 0.4rem 1.25rem; list-style: none;
  margin: 0 0 1.25rem; padding: 0; font-size: 0.92rem; }
a { color: var(--accent); text-underline-offset: 0.2em; }
section {
  background: var(--paper); border: 1px solid var(--line); border-radius: 12px;
  padding: 1.5rem; margin: 0 0 1.25rem; scroll-margin-top: 1rem;
}
section > :last-child { margin-bottom: 0; }
.scroll { overflow-x: auto; margin: 0 0 1rem; }
table { border-collapse: collapse; font-size: 0.92rem; min-width: min(100%, 24rem); }
caption { caption-side: top; text-align: left; color: var(--soft); padding: 0 0 0.4rem; }
th, td { padding: 0.4rem 1rem 0.4rem 0.6rem; text-align: left; vertical-align: top;
  border-bottom: 1px solid var(--line); }
thead th { color: var(--soft); font-weight: 600; border-bottom-width: 2px; white-space: nowrap; }
tbody tr:nth-child(even) { background: var(--stripe); }
.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 22rem), 1fr));
  gap: 1.25rem; align-items: start; }
figure { margin: 0; }
figure.wide { grid-column: 1 / -1; }
figure img { display: block; max-width: 100%; height: auto; margin: 0 auto; background: #ffffff;
  border: 1px solid var(--line); border-radius: 8px; }
figcaption { color: var(--soft); font-size: 0.9rem; margin-top: 0.5rem; }
pre { background: var(--ground); border: 1px solid var(--line); border-radius: 8px;
  padding: 0.9rem 1rem; margin: 0 0 1rem; overflow-x: auto;
  font: 0.85rem/1.5 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; }
@media (max-width: 40rem) {
  body { padding: 1.25rem 0.6rem 2rem; }
  section { padding: 1rem; }
}
@media print {
  :root { --paper: #ffffff; --ground: #ffffff; --ink: #000000; --soft: #444444;
    --line: #cccccc; --accent: #000000; --stripe: #ffffff; }
  body { padding: 0; font-size: 11pt; }
  nav { display: none; }
  section { border: 0; padding: 0; }
  figure, tr { break-inside: avoid; }
  h2 { break-after: avoid; }
  pre { white-space: pre-wrap; }
}
"""

PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<title>{{ title }}</title>
<style>{{ style }}</style>
</head>
<body>
<header><h1>{{ title }}</h1></header>
{% if sections|length > 3 %}
<nav aria-label="Sections"><ul>
{% for section in sections %}
<li><a href="#section-{{ loop.index }}">{{ section.heading }}</a></li>
{% endfor %}
</ul></nav>
{% endif %}
<main>
{% for section in sections %}
<section id="section-{{ loop.index }}">
<h2>{{ section.heading }}</h2>
{% for paragraph in section.paragraphs %}
<p>{{ paragraph }}</p>
{% endfor %}
{% for table in section.tables %}
<div class="scroll"><table>
{% if table.caption %}
<caption>{{ table.caption }}</caption>
{% endif %}
<thead><tr>
{% for name, number in table.columns %}
<th scope="col"{% if number %} class="number"{% endif %}>{{ name }}</th>
{% endfor %}
</tr></thead>
<tbody>
{% for row in table.rows %}
<tr>
{% for text, number in row %}
<td{% if number %} class="number"{% endif %}>{{ text }}</td>
{% endfor %}
</tr>
{% endfor %}
</tbody>
</table></div>
{% endfor %}
{% if section.figures %}
<div class="figures">
{% for figure in section.figures %}
<figure{% if figure.wide %} class="wide"{% endif %}>
<img src="data:image/png;base64,{{ figure.data }}" alt="{{ figure.alt }}"
 width="{{ figure.width }}" height="{{ figure.height }}">
<figcaption>{{ figure.caption }}</figcaption>
</figure>
{% endfor %}
</div>
{% endif %}
{% if section.code %}
<pre><code>{{ section.code }}</code></pre>
{% endif %}
</section>
{% endfor %}
</main>
</body>
</html>
"""
