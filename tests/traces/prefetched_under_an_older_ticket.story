A worker holds a payload ahead that is over: the request has resumed elsewhere, and was swapped out
anew. Both hints that say so are lost. What the worker holds has the name of the request, but not the
ticket of the resume: it is dropped, and the payload comes from the store.

given
    block size 8
    worker w0 blocks 3 node n0 step 20
    worker w1 blocks 3 node n1 step 60
    store s0 budget 8 node n0
    store s1 budget 8 node n1
    gateway g0
    client c0 prompt 17 max 7
    client c1 prompt 17 max 5
    client c2 prompt 17 max 7
    client c3 prompt 10 max 14

story
    come c0
    see w0 -> g0 Tokens c0 index=0
    come c1
    see k1 -> w1 Admit c1
    come c2
    see k1 -> w1 Prefetch c0
    see w1 -> s0 BeginGet c0
    lose k1 -> w1 Prefetch c0 ticket=none
    abort c2
    see k1 -> w0 SwapIn c0
    see w0 hears FetchDone status=ok ahead=none
    lose k1 -> w1 Prefetch c0
    come c3
    see k1 -> w0 SwapOut c0
    see w1 hears SwapIn c0
    see w1 hears FetchDone status=ok ahead=none
    finish
    expect w1 prefetches == 1
    expect w1 prefetches_wasted == 1
    expect w1 recomputed == 0
