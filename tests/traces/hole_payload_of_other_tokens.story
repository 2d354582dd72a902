A payload holds tokens that its gateway never got; another run then generates others in their
place; and after a restart the payload is used again.
Rule: the manifest carries token ids, and KV is used only up to their longest common prefix with
the gateway's tokens.

given
    block size 8
    worker w0 blocks 3 step 20
    store s0 budget 8
    gateway g0
    client c0 prompt 17 max 7
    client c1 prompt 17 max 4
    set noisy true

story
    come c0
    see w0 -> g0 Tokens c0 index=0
    hold w0 -> g0 Tokens c0 index=1
    see w0 hears StepDone
    see w0 hears StepDone
    see w0 hears StepDone
    come c1
    see w0 -> s0 Commit c0
    see s0 -> w0 StoreReply c0 status=ok
    cut w0 g0
    see k1 -> w0 SwapIn c0
    stop k1
    see w0 -> g0 Tokens c0 index=5
    kill w0
    kill k1
    start w0
    replace k
    see k2 -> w0 SwapIn c0
    see w0 hears FetchDone status=ok
    finish
    expect c0 tokens == 7
