"""A small OpenAI-compatible chat server on transformers' own generation: `python -m kt_core.serve`.

One generation runs at a time; others wait in a bounded queue. What is not supported is answered
with a 400 that names the field, and nothing is silently ignored.
"""
