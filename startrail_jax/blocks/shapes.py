"""The legend of dimensions and the array aliases of the package.

Upper-case names such as `B T N H` are sizes of whole arrays; lower-case names such as `b t n h` are
what one device sees inside `shard_map`.

    B  batch                      N  query heads (a multiple of K)
    T  query length, in tokens    K  key and value heads
    S  key length, in tokens      H  head_dim of queries and keys
                                  V  head_dim of values and outputs
"""

from jaxtyping import Array, Float, Float32, Int32

QueryShard = Float[Array, "b t n h"]
KeyShard = Float[Array, "b s k h"]
ValueShard = Float[Array, "b s k v"]
OutShard = Float[Array, "b t n v"]

# Latents with the rotated part of their keys, as one key head without values: see `rings.latents`.
LatentShard = Float[Array, "b s 1 c"]
KeyOrLatentShard = Float[Array, "b s k _"]

# The log-sum-exp of each query and head: the natural logarithm of the sum of the exponentials of
# the scaled logits. It has this one layout everywhere.
LseShard = Float32[Array, "b n t"]

# In trees with a window, a token has two numbers.
QuerySegments = Int32[Array, "b t"] | Int32[Array, "b t 2"]
KeySegments = Int32[Array, "b s"] | Int32[Array, "b s 2"]

# The lse of a row that sees no key. It is not -inf: the difference of two such rows would be NaN.
EMPTY = -1e30
