import pytest

from tools.offline import main


@pytest.mark.parametrize(
    "text",
    [
        '<script src="https://cdn.example/katex.js"></script>',
        '<link rel="stylesheet" href="//fonts.example/css">',
        '<img alt="" src="http://example/picture.png">',
        '<p style="background: url(https://example/a.png)">',
    ],
)
def test_what_another_machine_is_asked_for_is_named(tmp_path, capsys, text):
    (tmp_path / "page").mkdir()
    (tmp_path / "page" / "index.html").write_text(f"<html><body>{text}</body></html>")
    assert main(tmp_path) == 1
    assert "index.html asks another machine for " in capsys.readouterr().out


def test_style_sheets_are_looked_at(tmp_path, capsys):
    (tmp_path / "a.css").write_text('@font-face { src: url("https://fonts.example/a.woff2") }')
    assert main(tmp_path) == 1
    assert "https://fonts.example/a.woff2" in capsys.readouterr().out


def test_links_and_what_lies_beside_are_fine(tmp_path):
    (tmp_path / "a.css").write_text("@font-face { src: url(fonts/a.woff2) }")
    (tmp_path / "index.html").write_text(
        '<link rel="canonical" href="https://example/"><link rel="stylesheet" href="a.css">'
        '<script src="a.js"></script><a href="https://example/">a link</a>'
    )
    assert main(tmp_path) == 0


def test_an_empty_folder_is_no_site(tmp_path):
    assert main(tmp_path) == 1
