// Typesets what pymdownx.arithmatex has marked, with the KaTeX beside this file.
for (const element of document.querySelectorAll(".arithmatex")) {
  const source = element.textContent.trim();
  const displayMode = source.startsWith("\\[");
  katex.render(source.slice(2, -2), element, { displayMode, throwOnError: false });
  // Nothing is cut on a phone: a formula wider than the page is made smaller.
  if (displayMode && element.scrollWidth > element.clientWidth) {
    element.style.fontSize = `${Math.max(0.6, (0.9 * element.clientWidth) / element.scrollWidth)}em`;
  }
}
