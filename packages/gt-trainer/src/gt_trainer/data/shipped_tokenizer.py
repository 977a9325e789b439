"""Where the tokenizer that ships with gt-trainer lies.

A byte-level BPE of 2048 tokens, the vocabulary of torchtitan's debug models, in the Hugging
Face format. `build_tokenizer` rebuilds it.
"""

from pathlib import Path

from gt_trainer.data.build_tokenizer import TOKENIZER_FILE


def shipped_tokenizer_path() -> Path:
    """Return the folder to give as `hf_assets_path`.

    Raises:
        FileNotFoundError: The package was installed without its data, or inside an archive.
    """
    folder = Path(__file__).parent / "tokenizer"
    if not (folder / TOKENIZER_FILE).is_file():
        raise FileNotFoundError(
            f"gt-trainer's tokenizer is missing from {str(folder)!r}; reinstall gt-trainer as "
            "files (not a zip archive), or rebuild it there: "
            f"python -m gt_trainer.data.build_tokenizer --out {folder}"
        )
    return folder
