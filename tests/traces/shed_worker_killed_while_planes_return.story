A worker dies while its planes are on their way back for an exact request: its next life has them,
and both requests end.

given
    block size 2
    worker w0 blocks 6 tail 4 return 200 step 20
    store s0 budget 16
    gateway g0
    set levels 2
    client c0 prompt 4 max 10
    client c1 prompt 2 max 4 exact true

story
    come c0
    see w0 hears PlanesShed
    see w0 -> g0 Tokens c0 index=9
    come c1
    see w0 -> k1 WorkerReport shed.state=restoring
    kill w0
    start w0
    finish
    expect c0 tokens == 10
    expect c1 tokens == 4
