"""What people who come from other programs type: their options, variables and commands, and what stands for them here.

An option of the same meaning is taken as ours; of any other we say in a line what there is instead. What `kv` has under
the same name is not listed.
"""

from __future__ import annotations

# Ours, and names of the same meaning.
_ALIASES = {
    "--ctx-size": "--num-ctx --n-ctx --context-length --context-size --max-model-len --max-seq-len",
    "--predict": "--num-predict --max-new-tokens",
    "--model": "-hf -hfr --hf-repo --model-path",
    "--threads": "--num-thread --num-threads --n-threads",
    "--ubatch-size": "--n-ubatch --prefill-step-size --max-num-batched-tokens",
    "--cache-type": "--kv-cache-dtype --kv-cache-type",
    "--page-size": "--block-size",
    "--keep": "--num-keep --n-keep",
    "--vram-limit": "--gpu-memory-utilization",
    "--lora": "--lora-scaled",
    "--chat-template": "--chat-template-file",
    "--cache": "--enable-prefix-caching --cache-prompt",
    "--no-cache": "--no-enable-prefix-caching --no-cache-prompt",
    "--prompt-cache": "--prompt-cache-file",
    "--repeat-penalty": "--repetition-penalty",
    "--system": "--system-prompt",
    "--system-file": "--system-prompt-file",
    "--stats": "--perf",
    "--no-stats": "--no-perf",
}

# What stands behind the name in the line that says so.
_SAME = "is not needed: "
_NOTES = {
    "-ngl --gpu-layers --n-gpu-layers --num-gpu": _SAME + "--device picks the GPU and all layers go there",
    "-fa --flash-attn --flash-attention": _SAME + "attention never builds the matrix of scores",
    "-nkvo --no-kv-offload -kvo --kv-offload": "has no counterpart: the cache is where the model is, see --device",
    "--no-mmap --mmap --mlock": _SAME + "on a CPU weights are mapped from the file, on a GPU they are copied",
    "-mg --main-gpu -dev": "is --device cuda:N here",
    "-sm --split-mode -ts --tensor-split": "has no counterpart: kv uses one GPU, see --device",
    "-tp --tensor-parallel-size": "is --tp here, of kv run and kv serve with --engine vllm",
    "-pp --pipeline-parallel-size": "is --pp here, of kv run and kv serve with --engine vllm",
    "-b --batch-size": "is --ubatch-size here: the tokens of one prefill step",
    "-tb --threads-batch": _SAME + "--threads counts for prompts and answers",
    "--num-gpu-blocks-override --max-num-seqs --swap-space": (
        "is not needed: pages are taken as a sequence grows, see --ctx-size and --vram-limit"
    ),
    "--cpu-offload-gb": "is --cpu-offload SIZE here, of --engine vllm; kv itself runs a model on --device cpu",
    "--enforce-eager": "is --exact here, where the arithmetic is meant; graphs are always used",
    "--dtype --quantization": "is not needed: weights are used as the file stores them, see --cache-type for the cache",
    "--trust-remote-code": _SAME + "code in a model's repository is never run",
    "--kv-bits": "is --cache-type int8 or int4 here",
    "--kv-group-size --quantized-kv-start": "has no counterpart, see --cache-type, --kv-sink and --kv-tail",
    "--max-kv-size": "is --ctx-size N --evict sink here",
    "--context-shift --no-context-shift -lcs": "is --evict shift here; without it nothing is forgotten",
    "-cnv --conversation -i --interactive --interactive-first -if": "is the command kv chat here",
    "-no-cnv --no-conversation -st --single-turn": "is not needed: kv run answers one prompt; --raw uses no template",
    "-mli --multiline-input": 'is not needed: in kv chat """ begins and ends a message of several lines',
    "-co": "is --color auto, always or never here",
    "-hff --hf-file": "is part of the model's name here: -m org/repo:FILE",
    "-mu --model-url": "has no counterpart: -m takes org/repo[:quant] of the hub, or a file",
    "-hft --hf-token": "is the variable HF_TOKEN here",
    "--jinja --no-jinja": _SAME + "the model's own chat template is always used",
    "-rope-scaling --rope-scaling --rope-scale --rope-freq-base --rope-freq-scale --yarn-orig-ctx": (
        "has no counterpart: RoPE is as the model's file says"
    ),
    "-e --escape --no-escape": "has no counterpart: text is taken as it is; in bash $'a\\nb' is a line break",
    "--no-display-prompt --simple-io --log-disable": _SAME + "only the answer goes to stdout",
    "--warmup --no-warmup": _SAME + "nothing is computed that was not asked for",
    "--verbose-prompt": "is the command kv prompt here",
    "--grammar-file": "is --grammar FILE here, in Lark's notation",
    "-j --json-schema-file --format --response-format": "is --json-schema FILE; it takes the schema itself, too",
    "--lora-path --adapter-path": "is --lora FILE here, of an adapter as a .gguf file",
    "-md --model-draft": "is --draft-model here",
    "--draft --draft-max --draft-min --spec-draft-n-max --speculative-config": (
        "has no counterpart: how many tokens --spec guesses follows how often they are right"
    ),
    "--spec-type": "is --spec suffix|ngram|draft|mtp|off here",
    "--mmproj --image": "has no counterpart: models for images are not supported",
    "--host --port --api-key": "is an option of kv serve",
    "-cb --cont-batching": _SAME + "answers of kv serve and of --batch are always written together",
    "--keepalive": "is --keep-alive TIME here",
    "-np": "is --parallel here, for kv run --batch FILE",
    "--mirostat --typical --typical-p --tfs --xtc-probability --dynatemp-range --samplers": (
        "has no counterpart: tokens are chosen by --top-k, --top-p, --min-p and --temp"
    ),
    "--num-beams --beam-size": "has no counterpart: there is no beam search",
}

# Of the same meaning as one of our options; a variable or setting of ours stands above them.
VARIABLES = {
    "OLLAMA_CONTEXT_LENGTH": "ctx-size",
    "OLLAMA_KV_CACHE_TYPE": "cache-type",
    "LLAMA_ARG_MODEL": "model",
    "LLAMA_ARG_HF_REPO": "model",
    "LLAMA_ARG_CTX_SIZE": "ctx-size",
    "LLAMA_ARG_CACHE_TYPE_K": "cache-type-k",
    "LLAMA_ARG_CACHE_TYPE_V": "cache-type-v",
    "LLAMA_ARG_THREADS": "threads",
    "LLAMA_ARG_UBATCH": "ubatch-size",
    "LLAMA_ARG_N_PREDICT": "predict",
}
_VARIABLE_NOTES = {
    "OLLAMA_HOST": "kv serve --host and --port say where it listens",
    "OLLAMA_MODELS": "models are in the folder that kv doctor names; -m takes a file, too",
    "OLLAMA_FLASH_ATTENTION": "attention never builds the matrix of scores",
    "OLLAMA_KEEP_ALIVE": "KV_KEEP_ALIVE says how long a model stays behind a command; those of kv serve stay anyway",
    "OLLAMA_NUM_PARALLEL": "kv serve --parallel says how many answers are written at a time",
    "LLAMA_ARG_N_GPU_LAYERS": "--device picks the GPU and all layers go there",
    "LLAMA_ARG_FLASH_ATTN": "attention never builds the matrix of scores",
    "LLAMA_ARG_DEVICE": "see --device and KV_DEVICE",
    "LLAMA_ARG_HOST": "kv serve --host says where it listens",
    "LLAMA_ARG_PORT": "kv serve --port says where it listens",
}
PREFIXES = ("OLLAMA_", "LLAMA_ARG_")

# Commands that other programs have: what to type instead.
_COMMANDS = {
    "ls list": "kv models ls lists models, kv chat ls saved chats, kv cache ls prompt caches",
    "server start api": "kv serve answers other programs, kv run one prompt, kv chat talks",
    "show": "kv inspect MODEL shows a model, kv chat show NAME a saved chat, kv cache show ID a prompt cache",
    "rm remove delete": "kv models rm NAME removes a model, kv chat rm a saved chat, kv cache rm a prompt cache",
    "sessions session chats logs history export": "kv chat ls lists saved chats, kv chat export NAME writes one",
    "download get fetch": "kv pull MODEL downloads one",
    "search": "kv models ls --all lists the models known by name",
    "generate complete completions ask cli": "kv run answers one prompt",
    "template render": "kv prompt shows a prompt with its chat template, kv inspect MODEL the template",
    "create quantize": "kv uses GGUF files as they are (kv run -m FILE.gguf), and kv convert makes them of folders",
    "prune clean clear": "kv cache prune clears prompt caches, kv storage rm KIND anything that kv keeps",
    "update upgrade": "pip install -U does it, from where kv was installed",
    "uninstall": "kv storage rm --all removes what kv keeps, pip uninstall kvcli the program",
    "settings set": "kv config set NAME VALUE keeps a setting, kv config show lists them",
    "benchmark": "kv bench",
    "login": "set HF_TOKEN for private and gated repositories",
}
_COMMANDS_OF_CONFIG = {
    "get ls list print": "kv config show lists settings, kv config show NAME shows one",
    "edit": "kv config path names the file, kv config set NAME VALUE changes it",
}

# What other programs are also called: as --print-args and --engine name them.
_PROGRAMS = {
    "llama-server": "llama.cpp llama-cpp llamacpp llama_cpp llama llama-cpp-server",
    "sglang": "sgl",
    "vllm": "",
}


def _by_name(table: dict[str, str]) -> dict[str, str]:
    return {name: text for names, text in table.items() for name in names.split()}


ALIASES = {name: ours for ours, names in _ALIASES.items() for name in names.split()}
NOTES = _by_name(_NOTES)
COMMANDS = _by_name(_COMMANDS)
COMMANDS_OF_CONFIG = _by_name(_COMMANDS_OF_CONFIG)


def program(word: str) -> str:
    """The program that somebody means, as kv spells it; "" = none that kv knows."""
    known = {name: ours for ours, names in _PROGRAMS.items() for name in (ours, *names.split())}
    return known.get(word.lower(), "")


def unread(name: str) -> str:
    """Why a variable of another program is not read; "" for one that is read, or is nobody's."""
    if name in VARIABLES or not name.startswith(PREFIXES):
        return ""
    return _VARIABLE_NOTES.get(name, "kv config show lists what is")
