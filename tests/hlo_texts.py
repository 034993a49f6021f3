"""Programs of XLA as texts, whose computations have the parameter %x of 24 floats, 96 bytes."""

SUM = """\
%sum (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %add = f32[] add(%a, %b)
}
"""


def module(entry, *computations, header="num_partitions=8"):
    main = f"ENTRY {computation('main', *entry)}"
    return "\n\n".join([f"HloModule jit_f, is_scheduled=true, {header}", SUM, *computations, main])


def computation(name, *instructions):
    lines = ["%x = f32[4,6]{1,0} parameter(0)", *instructions]
    body = "\n".join(f"  {line}" for line in lines)
    return f"%{name} (x: f32[4,6]) -> f32[4,6] {{\n{body}\n}}\n"


def loop(name, body, count=None, condition="never"):
    known = f', backend_config={{"known_trip_count":{{"n":"{count}"}}}}' if count else ""
    return f"%{name} = f32[4,6]{{1,0}} while(%x), condition=%{condition}, body=%{body}{known}"


NEVER = computation("never", "ROOT %p = pred[] constant(false)")
