"""The local engine: one base model, many adapters, one process, the OpenAI wire format.

For laptops without a vLLM wheel and for tests; not for production. ``python -m
marft_agents.serving.local --model DIR`` starts it. It answers what vLLM answers on the routes this
project uses, and its token ids and log-probabilities are those of a plain transformers + PEFT pass.
Nothing here loads torch until the engine is built.
"""
