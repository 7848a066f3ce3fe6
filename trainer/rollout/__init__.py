"""Where completions come from: the embedded sampler in this process, and a scripted fake for tests.

The port is `trainer.types.Sampler`: token ids in, token ids and their log-probs out.
"""
