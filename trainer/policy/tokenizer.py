"""Text to token ids and back, before and after a model exists.

build_tokenizer(config.base)   the campaign's tokenizer, known before the model is: from the alphabet, a directory, a GGUF
load_tokenizer(directory)      the one saved with a model
encode(tokenizer, text)        ids without special tokens added; a character that has no token is a ValueError
tokenizer_hash(tokenizer)      equal for equal vocabularies, special tokens, chat template and behaviour on a probe text
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from trainer.config.schema import Base
from trainer.errors import NOBODYS_FAULT, ModelError, first_line
from trainer.files import canonical_json, place_of, sha256_text

PAD, EOS, UNKNOWN = "<pad>", "<eos>", "<unk>"
_PROBE = "The 12 quick foxes + 34 lazy dogs = 46, or not?\n\tx = {1: 'é'}"


def character_tokenizer(alphabet: str) -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per character of the alphabet, after `<pad>`, `<eos>` and `<unk>`."""
    vocabulary = {token: index for index, token in enumerate([PAD, EOS, UNKNOWN, *alphabet])}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=core, pad_token=PAD, eos_token=EOS, unk_token=UNKNOWN)


def find_gguf(directory: Path) -> Path:
    """Return the one .gguf file of a directory."""
    files = sorted(directory.glob("*.gguf"))
    if len(files) != 1:
        raise ModelError(
            f"{directory}: expected one .gguf file, found {len(files)}; set base.source to gguf:<directory with one>"
        )
    return files[0]


def package_directory(name: str) -> Path:
    """Return the folder of an installed Python package, without importing it."""
    spec = find_spec(name) if name.isidentifier() else None
    if spec is None or not spec.submodule_search_locations:
        raise ModelError(f"base.source: no Python package {name!r} is installed here; install it, or give a directory")
    return Path(next(iter(spec.submodule_search_locations)))


def resolve_directory(base: Base) -> Path:
    """Return the local directory of an `hf:` or `gguf:` base; a hub name is fetched, or found in the hub's local cache."""
    if base.locator.startswith("package:"):
        return package_directory(base.locator.removeprefix("package:"))
    path = place_of(base.locator)
    if path.is_dir():
        return path
    if base.kind == "gguf" or base.locator.startswith("/") or base.locator.startswith((".", "~")) or base.locator.count("/") > 1:
        raise ModelError(f"base.source = {base.source!r}: no such directory as {path}; give the right one")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(base.locator, revision=base.revision))
    except NOBODYS_FAULT:
        raise
    except Exception as error:
        raise ModelError(
            f"base.source = {base.source!r}: neither a local directory nor to be had from the hub ({type(error).__name__}); "
            "give a directory, or download it where there is a network and set HF_HOME"
        ) from error


def _from_directory(directory: Path, **options: Any) -> PreTrainedTokenizerBase:
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            directory, local_files_only=True, trust_remote_code=False, **options
        )
    except NOBODYS_FAULT:
        raise
    except Exception as error:  # whatever a broken file makes of transformers' readers
        reason = first_line(error)
        raise ModelError(f"{directory}: holds no tokenizer that can be loaded ({reason}); add its tokenizer files") from error
    if tokenizer.eos_token_id is None:
        raise ModelError(f"{directory}: its tokenizer has no EOS token, so no completion could end; set eos_token")
    return tokenizer


def build_tokenizer(base: Base) -> PreTrainedTokenizerBase:
    """Return the tokenizer that the campaign's base will have."""
    if base.kind == "scratch":
        return character_tokenizer(base.scratch.alphabet)
    directory = resolve_directory(base)
    if base.kind == "gguf":
        return _from_directory(directory, gguf_file=find_gguf(directory).name)
    return _from_directory(directory)


def load_tokenizer(directory: Path) -> PreTrainedTokenizerBase:
    """Return the tokenizer saved in a model's directory."""
    return _from_directory(directory)


def encode(tokenizer: PreTrainedTokenizerBase, text: str) -> tuple[int, ...]:
    """Return the token ids of a text, special tokens neither added nor removed.

    Raises:
        ValueError: names the characters that have no token.
    """
    ids = tuple(tokenizer.encode(text, add_special_tokens=False))
    if tokenizer.unk_token_id is not None and tokenizer.unk_token_id in ids:
        known = set(tokenizer.get_vocab())
        strange = "".join(sorted({c for c in text if c not in known})) or text
        raise ValueError(f"the tokenizer has no token for {strange!r}")
    return ids


def tokenizer_hash(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a sha256 that two tokenizers share when they turn text into the same ids."""
    special = [tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id]
    probe = tokenizer.encode(_PROBE, add_special_tokens=False)
    facts = [sorted(tokenizer.get_vocab().items()), special, tokenizer.chat_template, probe]
    return sha256_text(canonical_json(facts))
