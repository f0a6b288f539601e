use super::*;

/// Templates and what transformers 5.24 prints for them, with `x` as below:
/// `chat_template_utils._compile_jinja_template(template).render(x=x)`.
#[test]
fn templates_print_what_transformers_prints() {
    let x = serde_json::json!({
        "s": "a\"b\\\n\tü\u{2028}<&>'\u{1}\u{7f}", "n": 1, "f": 1.5e-7, "big": 1e22, "i": 100.0,
        "list": [1, [], {}, null, true], "e": {}
    });
    let cases = [
        (
            "{{ x | tojson }}",
            "{\"s\": \"a\\\"b\\\\\\n\\tü\u{2028}<&>'\\u0001\u{7f}\", \"n\": 1, \"f\": 1.5e-07, \"big\": 1e+22, \"i\": 100.0, \"list\": [1, [], {}, null, true], \"e\": {}}",
        ),
        (
            "{{ x | tojson(indent=2) }}",
            "{\n  \"s\": \"a\\\"b\\\\\\n\\tü\u{2028}<&>'\\u0001\u{7f}\",\n  \"n\": 1,\n  \"f\": 1.5e-07,\n  \"big\": 1e+22,\n  \"i\": 100.0,\n  \"list\": [\n    1,\n    [],\n    {},\n    null,\n    true\n  ],\n  \"e\": {}\n}",
        ),
        (
            "{{ x | tojson(ensure_ascii=True) }}",
            "{\"s\": \"a\\\"b\\\\\\n\\t\\u00fc\\u2028<&>'\\u0001\\u007f\", \"n\": 1, \"f\": 1.5e-07, \"big\": 1e+22, \"i\": 100.0, \"list\": [1, [], {}, null, true], \"e\": {}}",
        ),
        (
            "{{ x | tojson(separators=(',', ':'), sort_keys=True) }}",
            "{\"big\":1e+22,\"e\":{},\"f\":1.5e-07,\"i\":100.0,\"list\":[1,[],{},null,true],\"n\":1,\"s\":\"a\\\"b\\\\\\n\\tü\u{2028}<&>'\\u0001\u{7f}\"}",
        ),
        (
            "{{ x }}",
            "{'s': 'a\"b\\\\\\n\\tü\\u2028<&>\\'\\x01\\x7f', 'n': 1, 'f': 1.5e-07, 'big': 1e+22, 'i': 100.0, 'list': [1, [], {}, None, True], 'e': {}}",
        ),
        (
            "{{ none }} {{ true }} {{ 1.0 }} {{ missing }} {{ [1, none, 'a'] }} {{ (1,) }}",
            "None True 1.0  [1, None, 'a'] (1,)",
        ),
        (
            "{{ ' a\\x1c'.strip() }}|{{ 'a  b c'.split() | tojson }}|{{ 'a,b,c'.rsplit(',', 1) | tojson }}|{{ 'a,b,c'.split(',', 1)[1] }}",
            "a|[\"a\", \"b\", \"c\"]|[\"a,b\", \"c\"]|b,c",
        ),
        (
            "{{ 'a\\u2028b\\r\\nc'.splitlines() | tojson }}|{{ 'abc'.removeprefix('a').removesuffix('c') }}|{{ 'a=b=c'.rpartition('=') | list | tojson }}",
            "[\"a\", \"b\", \"c\"]|b|[\"a=b\", \"=\", \"c\"]",
        ),
        (
            "{{ x['s'][::-1] }}|{{ x.list[-2:] | tojson }}|{{ none is iterable }}|{{ 'a' is iterable }}",
            "\u{7f}\u{1}'>&<\u{2028}ü\t\n\\b\"a|[null, true]|False|True",
        ),
        (
            "{% for i in [1,2,3] %}\n  {% if i == 2 %}\n    {% continue %}\n  {% endif %}\n {{ i }}\n{% endfor %}\n",
            " 1\n 3\n",
        ),
        (
            "{% set ns = namespace(n=0) %}{% for i in range(3) %}{% set ns.n = ns.n + i %}{% endfor %}{{ ns.n }}",
            "3",
        ),
        (
            "{{ 1e16 }} {{ 1e-5 }} {{ 123456789.125 }} {{ 0.1 + 0.2 }}",
            "1e+16 1e-05 123456789.125 0.30000000000000004",
        ),
        ("{{ x | string | length }}", "128"),
        ("{{ ' a ' | trim }}|{{ 'xxaxx' | trim('x') }}", "a|a"),
        (
            "{{ x.items() | list | tojson }}|{{ x.get('nope', 'd') }}",
            "[[\"s\", \"a\\\"b\\\\\\n\\tü\u{2028}<&>'\\u0001\u{7f}\"], [\"n\", 1], [\"f\", 1.5e-07], [\"big\", 1e+22], [\"i\", 100.0], [\"list\", [1, [], {}, null, true]], [\"e\", {}]]|d",
        ),
    ];
    for (template, want) in cases {
        let got = environment().render_str(template, minijinja::context! { x => from_json(&x) });
        let got = got.unwrap_or_else(|e| panic!("{template}: {e}"));
        assert_eq!(got, want, "{template}");
    }
}

#[test]
fn templates_can_refuse_and_ask_for_the_date() {
    let render = |template| environment().render_str(template, ());
    let error = render("{{ raise_exception('roles must alternate') }}").unwrap_err();
    assert_eq!(error.detail(), Some("roles must alternate"));
    let date = time::macros::datetime!(2026-07-04 09:05 UTC);
    assert_eq!(strftime("%d %B %Y, %H:%M", date).unwrap(), "04 July 2026, 09:05");
    assert_eq!(render("{{ strftime_now('%Y') | length }}").unwrap(), "4");
}

#[test]
fn a_template_that_loops_on_and_on_is_an_error() {
    let endless = "{% for a in range(100000) %}{% for b in range(100000) %}{{ '' }}{% endfor %}{% endfor %}";
    let error = environment().render_str(endless, ()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::OutOfFuel);
    // A macro may call itself.
    let recursive = "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}";
    environment().render_str(recursive, ()).unwrap_err();
}
