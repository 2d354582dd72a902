A payload has been fetched ahead on another node when its request is aborted: the worker is told to
give the memory back at once, although it has no run of the request.

given
    block size 8
    worker w0 blocks 3 node n0 step 20
    worker w1 blocks 3 node n1 step 20
    store s0 budget 8 node n0
    store s1 budget 8 node n1
    gateway g0
    client c0 prompt 17 max 6
    client c1 prompt 17 max 6
    client c2 prompt 17 max 7

story
    come c0
    see w0 -> g0 Tokens c0 index=0
    come c1
    see k1 -> w1 Admit c1
    come c2
    see k1 -> w1 Prefetch c0
    see w1 -> s0 BeginGet c0
    abort c0
    see k1 -> w1 Prefetch c0 ticket=none
    run 2
    expect w1 prefetches_wasted == 1
    finish
    expect w1 prefetches == 1
