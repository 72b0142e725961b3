// Where code in the text breaks: not behind the dashes of an option or a hyphen, and behind a dot or a slash of a
// word that is too long for a phone.
const TOO_LONG = 40;

function pieces(word) {
  return word.length > TOO_LONG ? word.split(/(?<=\w[./])(?=\w)/) : [word];
}

function whole(piece) {
  if (!piece.includes("-") || piece.length > TOO_LONG) return piece;
  const element = document.createElement("span");
  element.style.whiteSpace = "nowrap";
  element.append(piece);
  return element;
}

for (const code of document.querySelectorAll(":not(pre) > code")) {
  if (code.childElementCount) continue;
  const parts = code.textContent.split(/(\s+)/).flatMap((word) => pieces(word).map((piece, i) =>
    (i ? [document.createElement("wbr"), whole(piece)] : [whole(piece)])));
  code.replaceChildren(...parts.flat());
}
