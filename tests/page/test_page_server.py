"""The view of the server: figures, launches by bucket, recent requests."""

import itertools
import re
import time
from collections.abc import Iterator

import msgspec
import pytest
from page_browser import HEIGHTS, chromium, open_page, window
from page_rig import STATS, PageServer, serving
from playwright.sync_api import Browser, expect

from engine.transport.messages import EngineStats

pytestmark = pytest.mark.page


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as opened:
        yield opened


@pytest.fixture
def server() -> Iterator[PageServer]:
    with serving() as opened:
        yield opened


@pytest.mark.parametrize("width", HEIGHTS)
def test_the_figures_have_units_and_legends(
    browser: Browser, server: PageServer, width: int
) -> None:
    server.fill()
    with window(browser, width) as page:
        open_page(page, server.url)
        page.click("#to-server")

        expect(page.locator("#running")).to_have_text("3")
        expect(page.locator("#waiting-tokens")).to_have_text("sequences; 412 prompt tokens")
        expect(page.locator("#kv-blocks")).to_have_text("37 of 256 blocks")
        # Two misses among 91,026.
        expect(page.locator("#hits")).to_have_text("99.9 %")
        expect(page.locator(".legend").first).to_contain_text("to the first token")
        expect(page.locator(".legend").first).to_contain_text("each line is ten times")
        expect(page.locator("#ticks span").first).to_have_text("10 ms")
        expect(page.locator("#ticks span").last).to_have_text("1000 s")
        # Every bar of the chart has a row in the table.
        expect(page.locator("#recent tr")).to_have_count(60)


def test_a_cpu_has_no_figures_of_buckets_and_graphs(browser: Browser) -> None:
    with serving(device="cpu") as server, window(browser) as page:
        open_page(page, server.url)
        page.click("#to-server")

        expect(page.locator("#kv")).to_be_visible()
        for name in ("hits", "padding", "graphs", "shapes-title", "prefill"):
            expect(page.locator(f"#{name}")).to_be_hidden()
        page.click("#glossary summary")
        expect(page.locator("#term-kv")).to_be_visible()
        expect(page.locator("#term-bucket")).to_be_hidden()


def test_figures_of_buckets_are_hidden_until_the_device_is_known(browser: Browser) -> None:
    with serving(api_keys=("k",)) as server, window(browser) as page:
        open_page(page, server.url, "key needed")
        page.click("#to-server")
        expect(page.locator("#kv")).to_be_visible()
        expect(page.locator("#hits")).to_be_hidden()

        page.fill("#key", "k")
        page.press("#key", "Enter")

        expect(page.locator("#hits")).to_be_visible()


@pytest.mark.parametrize("width", HEIGHTS)
def test_bars_are_spaced_and_the_newest_is_in_view(
    browser: Browser, server: PageServer, width: int
) -> None:
    server.fill()
    with window(browser, width) as page:
        open_page(page, server.url)
        page.click("#to-server")
        expect(page.locator("#bars span")).to_have_count(60)

        boxes = [bar.bounding_box() for bar in page.locator("#bars span").all()[-30:]]
        chart = page.locator("#bars").bounding_box()

        assert chart is not None
        edges = [(box["x"], box["x"] + box["width"]) for box in boxes if box is not None]
        assert all(right - left >= 5 for left, right in edges)
        assert all(after[0] - box[1] >= 1.5 for box, after in itertools.pairwise(edges))
        assert edges[0][0] >= chart["x"] and edges[-1][1] <= chart["x"] + chart["width"]
        # A line at each tick, from 10 ms to 1000 s.
        assert page.locator("#bars").evaluate("b => b.style.getPropertyValue('--decades')") == "5"
        expect(page.locator("#ages")).to_have_text("oldernewest")


def test_the_terms_are_explained_where_they_are_used(browser: Browser, server: PageServer) -> None:
    with window(browser) as page:
        open_page(page, server.url)
        page.click("#to-server")

        terms = page.locator("#server-view .term").all()
        titles = [term.get_attribute("title") for term in terms]

        assert len(titles) > 10 and all(titles)
        # A touch shows no tooltip: it leads to the explanation.
        page.locator(".term[data-term=padding]").first.click()
        expect(page.locator("#term-padding")).to_be_focused()
        expect(page.locator("#term-padding")).to_be_in_viewport()
        explanations = page.locator("#glossary dd").all_inner_texts()
        assert set(filter(None, titles)) <= set(explanations)


def test_the_rate_of_output_tokens_has_a_course(browser: Browser, server: PageServer) -> None:
    server.fill()
    server.call(lambda: setattr(server.rig.state, "created", int(time.time()) - 3 * 3600 - 125))
    with window(browser) as page:
        open_page(page, server.url)
        page.click("#to-server")
        expect(page.locator("#failed")).to_have_text("2")
        expect(page.locator("#failed-of")).to_have_text("of the last 60 requests")
        expect(page.locator("#uptime")).to_have_text("3 h 2 min")
        expect(page.locator("#output-rate")).to_have_text("0.0")
        decoded = {**STATS.useful_tokens, "decode": STATS.useful_tokens["decode"] + 10_000}
        server.client.stats = msgspec.structs.replace(STATS, useful_tokens=decoded)

        # 10,000 tokens in the two seconds between polls, or a little more.
        expect(page.locator("#course-figures")).to_contain_text(re.compile(r"highest [345],\d{3}"))

        server.client.stats = STATS
        # The counters of a restarted engine are lower.
        expect(page.locator("#output-rate")).to_have_text("\N{EN DASH}")
        expect(page.locator("#course-lines polyline")).to_have_count(2)
        tops = page.locator("#course-lines polyline").first.get_attribute("points")
        assert tops is not None and all(0 <= float(at.split(",")[1]) <= 100 for at in tops.split())
        expect(page.locator("#course-ticks span").last).to_have_text(re.compile("[4-9].*k|10k"))
        page.route("**/page/state", lambda route: route.abort())
        expect(page.locator("#uptime")).to_have_text("\N{EN DASH}")
        expect(page.locator("#failed")).to_have_text("\N{EN DASH}")


def test_a_sleeping_server_can_be_woken(browser: Browser) -> None:
    served = serving(enable_dev_endpoints=True, api_keys=("k",))
    with served as server, window(browser, 360) as page:
        server.client.stats = EngineStats(sleep="weights_offloaded")
        open_page(page, server.url, "key needed")
        page.fill("#key", "k")
        page.press("#key", "Enter")
        expect(page.locator("#trouble")).to_contain_text("The model is asleep")

        page.click("#wake-button")

        expect(page.locator("#status")).to_have_text("ready")
        expect(page.locator("#wake")).to_be_hidden()


def test_a_server_that_refuses_to_wake_says_so(browser: Browser, server: PageServer) -> None:
    server.client.stats = EngineStats(sleep="weights_offloaded")
    with window(browser) as page:
        open_page(page, server.url, "sleeping")

        # Without --enable-dev-endpoints there is no such route.
        page.click("#wake-button")

        expect(page.locator("#wake-error")).not_to_be_empty()
        expect(page.locator("#wake-button")).to_be_enabled()


def test_bars_of_short_requests_stay_visible_beside_a_long_request(
    browser: Browser, server: PageServer
) -> None:
    server.fill()
    with window(browser) as page:
        open_page(page, server.url)
        page.click("#to-server")
        expect(page.locator("#bars span")).to_have_count(60)

        heights = page.locator("#bars span").evaluate_all("bars => bars.map(b => b.offsetHeight)")

        chart = page.locator("#bars").evaluate("bars => bars.offsetHeight")
        assert max(heights) > 0.9 * chart
        # The shortest request takes 0.8 s, the longest 600 s.
        assert min(heights) > 0.35 * chart
        expect(page.locator("#bars .failed")).to_have_count(2)


def test_a_focused_cell_shows_its_numbers(browser: Browser, server: PageServer) -> None:
    server.fill()
    with window(browser) as page:
        open_page(page, server.url)
        page.click("#to-server")
        cell = page.locator("#decode td[data-share]").first
        cell.focus()

        expect(page.locator("#cell")).to_contain_text(": 896 launches, 896 hits")
        # The next poll redraws the table.
        page.wait_for_timeout(2500)
        assert page.evaluate("document.activeElement.dataset.share") is not None
        page.click("[data-shows=padding]")
        expect(page.locator("#decode td[data-share]").first).to_contain_text("%")
        expect(page.locator("#scale-high")).to_have_text("100 % of the tokens")


def test_the_server_view_has_its_own_url_and_working_links(
    browser: Browser, server: PageServer
) -> None:
    with window(browser) as page:
        open_page(page, server.url)
        page.goto(f"{server.url}/#server")

        expect(page.locator("#server-view")).to_be_visible()
        expect(page.locator("#chat-view")).to_be_hidden()
        for link in page.locator(".links a").all():
            answer = page.request.get(f"{server.url}/{link.get_attribute('href')}")
            assert answer.ok, answer.url
        page.go_back()
        expect(page.locator("#chat-view")).to_be_visible()


@pytest.mark.parametrize(("scheme", "is_dark"), [("light", False), ("dark", True)])
def test_the_api_documentation_follows_the_color_scheme_of_the_browser(
    browser: Browser, server: PageServer, scheme: str, is_dark: bool
) -> None:
    with window(browser, scheme=scheme) as page:
        page.goto(f"{server.url}/docs")
        expect(page.locator(".swagger-ui .title").first).to_be_visible()

        colours = page.evaluate(
            """() => ["html", ".swagger-ui .title"].map((selector) => {
                const style = getComputedStyle(document.querySelector(selector));
                return selector === "html" ? style.backgroundColor : style.color;
            })"""
        )

        # Without a background color, the background is white.
        shown = [colour.replace("rgba(0, 0, 0, 0)", "rgb(255, 255, 255)") for colour in colours]
        ground, text = (sum(map(int, re.findall(r"\d+", colour)[:3])) for colour in shown)
        assert (ground < text) is is_dark, colours


def test_a_pooling_model_has_no_chat(browser: Browser, server: PageServer) -> None:
    with window(browser) as page:
        page.route(
            "**/page/state",
            lambda route: route.fulfill(json={**route.fetch().json(), "pools": True}),
        )
        open_page(page, server.url)

        expect(page.locator("#pooling-view")).to_contain_text("there is no chat")
        expect(page.locator("#chat-view")).to_be_hidden()
        page.click("#to-server")
        expect(page.locator("#server-view")).to_be_visible()
