"""All that pw uses of JAX without a promise of JAX: names of `jax._src` and of jaxlib, by theme.

No other folder imports these names. A new release of JAX may change them, so each has a line that says what
it is for, and «Public:» the public way that would replace it.
A module here imports JAX when it is imported; `distributed`, `loaded` and `releases` do not.
"""
