"""The README's map is complete."""

from pathlib import Path

import gt_trainer

README = Path(__file__).parents[1] / "README.md"


def test_the_map_names_every_shelf():
    text = README.read_text(encoding="utf-8").partition("## Map")[2]
    source = Path(gt_trainer.__path__[0])
    shelves = {
        f"{path.name}/" if path.is_dir() else path.name
        for path in source.iterdir()
        if path.suffix == ".py" or (path / "__init__.py").exists()
    }
    unnamed = {"__init__.py", "__main__.py"}
    assert {name for name in shelves - unnamed if f"`{name}`" not in text} == set()
