A payload has been fetched ahead on another node when the controller dies, and its request is aborted
before the next one starts. That one knows of no hint that it could call off: the worker gives the
memory back by itself once nobody has named the payload for long enough.

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
    kill k
    abort c0
    run 100
    replace k
    expect w1 prefetches_wasted == 0
    run 2000
    expect w1 prefetches_wasted == 1
    finish
    expect w1 prefetches == 1
