"""The table of configurations is light and consistent in itself."""

import subprocess
import sys

from gt_trainer.models.catalog import CATALOG, INTENDED_WORLD_SIZE


def test_every_entry_is_found_under_its_own_names():
    for module, table in CATALOG.items():
        for config, entry in table.items():
            assert (entry.module, entry.config) == (module, config)
            assert config.startswith(module)


def test_world_sizes_cover_every_entry_by_a_unique_name():
    names = [config for table in CATALOG.values() for config in table]
    assert list(INTENDED_WORLD_SIZE) == names
    assert len(set(names)) == len(names)


def test_reading_the_catalog_loads_no_torch():
    source = (
        "import sys, gt_trainer.models.catalog\n"
        "assert 'torch' not in sys.modules and 'torchtitan' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", source], check=True)
