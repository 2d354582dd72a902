A resume has claimed what was fetched ahead, and its request is aborted before the gateway has let the
run attach: nobody will fetch, so the payload is dropped with the run.

given
    block size 8
    worker w0 blocks 3 node n0 step 20
    worker w1 blocks 3 node n1 step 20
    store s0 budget 8 node n0
    store s1 budget 8 node n1
    gateway g0
    client c0 prompt 17 max 6
    client c1 prompt 17 max 4
    client c2 prompt 17 max 6

story
    come c0
    see w0 -> g0 Tokens c0 index=0
    come c1
    see k1 -> w1 Admit c1
    come c2
    see k1 -> w1 Prefetch c0
    see w1 -> s0 BeginGet c0
    hold w1 -> g0 Attach c0
    see w1 hears SwapIn c0
    abort c0
    run 1000
    release
    finish
    expect w1 prefetches == 1
    expect w1 prefetches_used == 0
    expect w1 prefetches_wasted == 1
