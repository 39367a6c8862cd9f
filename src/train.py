"""Training under a launcher: `accelerate launch --config_file CONFIG src/train.py YAML`.

This is LLaMA-Factory's own entry point and nothing else; `use_kt: true` in the YAML is what
brings this package in, as it does under `llamafactory-cli train YAML`.
"""

from llamafactory.train.tuner import run_exp

if __name__ == "__main__":
    run_exp()
