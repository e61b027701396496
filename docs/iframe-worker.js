// A Worker in a hidden frame. The search is a worker, and browsers start none for pages that are opened as files.
if (location.protocol === "file:") {
  window.IFrameWorker = window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.body.appendChild(document.createElement("iframe"));
      frame.hidden = true;
      frame.contentDocument.write("<body>");
      frame.contentDocument.close();
      const inside = this.inside = frame.contentWindow;
      const load = source => new Promise((loaded, failed) => {
        const script = inside.document.createElement("script");
        inside.document.body.append(Object.assign(script, {src: source, onload: loaded, onerror: failed}));
      });
      inside.importScripts = (...sources) =>
        sources.reduce((before, source) => before.then(() => load(source)), Promise.resolve());
      inside.postMessage = data => this.dispatchEvent(new MessageEvent("message", {data}));
      this.ready = load(new URL(url, document.baseURI).href);
    }

    postMessage(data) {
      this.ready.then(() => this.inside.dispatchEvent(new MessageEvent("message", {data})));
    }
  };
}
