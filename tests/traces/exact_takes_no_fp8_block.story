A prompt that FP8 steps have computed lies in the prefix cache. An exact request with the same prompt
computes it again in FP16 and leaves its own blocks in their place, and the next exact one takes
those.

given
    block size 2
    worker w0 blocks 16 step 5
    store s0 budget 8
    gateway g0
    client c0 prompt 6 shared 6 max 3
    client c1 prompt 6 shared 6 max 3 exact true
    client c2 prompt 6 shared 6 max 3 exact true
    set prefix_cache true
    set levels 2
    set precision fp8

story
    come c0
    see g0 -> c0 Finished
    expect w0 precision.level == 1
    come c1
    see g0 -> c1 Finished
    expect w0 prefix_hit_tokens == 0
    expect w0 precision.level == 0
    come c2
    see g0 -> c2 Finished
    expect w0 prefix_hit_tokens == 4
    finish
