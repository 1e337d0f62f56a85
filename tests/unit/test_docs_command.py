"""``deepstow docs`` and the configs of the package: what is named without a folder, from anywhere."""

import re
from pathlib import Path

import pytest

from deepstow.launch import cli, docs, plan, shipped
from tests.e2e.commands import write_config

PAGES = {path.stem: path for path in docs.PAGES.rglob("*.md")}


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_every_page_is_in_the_list_by_part(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["docs"]) == 0
    said = capsys.readouterr().out
    listed = dict(re.findall(r"^  (\S+) +(.+)$", said, re.MULTILINE))
    assert set(listed) == set(PAGES) and said.startswith("Start:\n")
    assert f"# {listed['config']}" in PAGES["config"].read_text().splitlines()


def test_a_page_is_printed_with_commands_in_place_of_links(capsys: pytest.CaptureFixture[str]) -> None:
    for name in PAGES:
        assert cli.main(["docs", name]) == 0
        said = capsys.readouterr().out
        assert said.startswith("# ") and "<!--" not in said and not re.search(r"\]\([\w/.-]+\.md", said), name
    assert docs.plain("see [the plan](../plan.md#peak) and [more](https://x.y/z.md)") == (
        "see the plan (deepstow docs plan) and [more](https://x.y/z.md)"
    )
    assert cli.main(["docs", "confg"]) == 2
    wanted = "deepstow docs confg: no such page; all of them: deepstow docs; did you mean 'config'?\n"
    assert capsys.readouterr().err == wanted


def test_configs_of_the_package(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each can be loaded from any folder, also what it names beside it; a file of the user's own comes first."""
    said: list[str] = []
    names = [path.stem for path in shipped.FOLDER.glob("*.yaml") if path.stem != "base"]
    for name in names:
        assert shipped.load(name, say=said.append).training.output_dir == f"runs/{name}"
    assert said == [f"config: {name}.yaml of deepstow, {shipped.FOLDER / name}.yaml" for name in names]
    teacher = shipped.load("distill", say=said.append).distill
    assert teacher is not None and (Path(teacher.teacher) / "config.json").is_file()
    write_config(tmp_path).rename("qlora.yaml")
    assert shipped.load("qlora", say=said.append).model.lora is None and said[-1] == "config: qlora.yaml"
    assert plan.main(["--config", "qlra"]) == 2
    assert capsys.readouterr().err.endswith("; did you mean 'qlora'?\n")
    assert plan.main(["--config", "qlra.yaml"]) == 2
    assert capsys.readouterr().err == "qlra.yaml: no such file; did you mean 'qlora.yaml'?\n"
