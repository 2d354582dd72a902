A worker is killed right after its commit was acknowledged: the payload outlives it.

given
    block size 2
    worker w0 blocks 4 step 20
    worker w1 blocks 3 step 20
    store s0 budget 8
    gateway g0
    client c0 prompt 3 max 5
    client c1 prompt 3 max 5

story
    come c0
    see w0 -> g0 Tokens c0 index=0
    come c1
    see s0 -> w0 StoreReply c0 status=ok
    see w0 -> s0 Commit c0
    see s0 -> w0 StoreReply c0 status=ok
    kill w0
    start w0
    see k1 -> w0 SwapIn c0
    see w0 hears FetchDone status=ok
    finish
