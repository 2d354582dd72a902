A request swapped out in the middle of its prompt does not compute again what it had.

given
    block size 2
    worker w0 blocks 8 chunk 2 step 20
    store s0 budget 8
    gateway g0
    client c0 prompt 15 max 1
    client c1 prompt 15 max 1

story
    come c0
    see w0 hears StepDone
    expect w0 has c0 prefill
    come c1
    see k1 -> w0 SwapOut c0
    see w0 -> s0 Commit c0
    see s0 -> w0 StoreReply c0 status=ok
    expect w0 lacks c0
    see k1 -> w0 SwapIn c0
    see w0 hears FetchDone status=ok
    expect w0 has c0 prefill
    finish
    expect w0 tokens_computed == 30
