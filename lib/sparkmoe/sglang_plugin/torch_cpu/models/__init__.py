"""`SGLANG_EXTERNAL_MODEL_PACKAGE` on the CPU: SGLang looks here for a model before it imports all of its own.

That search imports some 200 model files, seconds of a start. An architecture that is not found here is still
searched for there.
"""
